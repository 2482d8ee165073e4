"""Rounds in which each node of real processes merges by itself; all nodes merge at some.

All processes still meet in every round: they exchange reports, some hundred bytes each, and agree
to go on, to save or to stop. Weights leave a node only where all nodes merge.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from dbsl.cluster.barrier import BarrierCluster
from dbsl.cluster.server import Server
from dbsl.cluster.weights import FlatWeights
from dbsl.plan.turns import RoundReport, nodes_meet


class NodeBarrier(BarrierCluster):
    """Bulk synchronous rounds of nodes, weighted as `NodeServer` does it.

    The workers of a node hold its weights. The server has the global weights of when all nodes met.

    Args:
        weights: As for `Cluster`, like all that is not named here.
        server: As for `Cluster`.
        nodes: The node of each worker; workers are the last ranks.
        node_rounds: Rounds of an epoch after which all nodes merge, as they do at its end.
        timeout_s: Longest wait for a process of the node.
    """

    def __init__(
        self,
        weights: FlatWeights,
        server: Server | None,
        *,
        nodes: Sequence[int],
        node_rounds: int,
        timeout_s: float,
        **common: Any,
    ) -> None:
        super().__init__(weights, server, **common)
        self._node_rounds, self._timeout = node_rounds, timedelta(seconds=timeout_s)
        self._pulled = weights.vector.clone()  # the node's weights when the round began
        self._counted: dict[int, float] = {}  # f_i by node, since all have met
        self._launched = tuple(nodes)
        self._divide(self._launched)

    def state_dict(self) -> dict[str, Any]:
        """Return which round it is, the node's weights and what it has counted."""
        nodes = {"of": list(self._nodes), "counted": dict(self._counted)}
        return super().state_dict() | {"nodes": nodes}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` returned (a collective).

        Nodes are what they were until all have met: processes may be elsewhere by now.
        """
        super().load_state_dict(state)
        nodes = state["nodes"]
        self._counted = dict(nodes["counted"])
        if self._counted and tuple(nodes["of"]) != self._nodes:
            self._divide(nodes["of"])

    def _divide(self, nodes: Sequence[int]) -> None:
        """Make each node a process group of its own, if it has several workers (a collective)."""
        self._nodes, self._group = tuple(nodes), None
        first = dist.get_world_size() - len(nodes)  # a dedicated server comes before
        for node in sorted(set(nodes)):
            ranks = [first + worker for worker, own in enumerate(nodes) if own == node]
            group = dist.new_group(ranks, timeout=self._timeout) if len(ranks) > 1 else None
            if dist.get_rank() in ranks:
                self._group = group

    @torch.no_grad()
    def _meet(self, epoch: int, round_: int, report: RoundReport | None) -> None:
        """Merge what the workers of the node push, or all; no `report` on a dedicated server."""
        began = time.perf_counter()
        reports = self.control.gather_reports(report, self._figures)
        reports = self.control.with_lines(reports, report)
        self._refused += sum(r.refused for r in reports)
        merged: dict[int, float] = {}  # f_i by node, in this round
        for r in reports:
            if not r.refused:
                node = self._nodes[r.worker]
                merged[node] = merged.get(node, 0.0) + r.merge_weight
        for node, weight in merged.items():
            self._counted[node] = self._counted.get(node, 0.0) + weight
        if nodes_meet(round_, self._node_rounds, self._rounds_per_epoch):
            self._merge_all(report, reports, merged)
        else:
            self._merge_node(report, merged)
            if self.server is not None:
                self.server.push_joined(None, reports)
        if self.server is not None:
            self.server.finished.clear()  # turns() says when an epoch ends, on every rank alike
        self._waited_s += time.perf_counter() - began

    def _merge_node(self, report: RoundReport | None, merged: Mapping[int, float]) -> None:
        """Have the node's weights become the mean of its workers'."""
        weight = None if report is None else merged.get(self._nodes[report.worker])
        has_mates = self._group is not None and weight is not None
        if has_mates:
            self._weigh(report, weight)
        self.control.enter()  # every rank does, so that their counts tell who hangs
        if report is None:
            return
        if weight is None:  # all of the node's were refused
            self.weights.load(self._pulled)
        elif has_mates:
            dist.all_reduce(self._sum.vector, group=self._group)
            self.weights.load(self._sum.vector)
        self._pulled.copy_(self.weights.vector)

    def _merge_all(
        self,
        report: RoundReport | None,
        reports: Sequence[RoundReport],
        merged: Mapping[int, float],
    ) -> None:
        """Have all nodes' weights become the mean of theirs, or what the server makes of it."""
        total = sum(self._counted[node] for node in sorted(self._counted))
        if total:  # else all were refused, and the server's weights come back
            self._weigh_node(report, merged, total)
            self.control.enter()
            dist.all_reduce(self._sum.vector)
        self._has_global = bool(total) and not self._at_server
        if self._has_global:
            self.weights.load(self._sum.vector)
            self._pulled.copy_(self._sum.vector)
        if self.server is not None:
            self.server.push_joined(self._sum.vector if total else None, reports)
        self._counted.clear()
        if self._nodes != self._launched:
            self._divide(self._launched)

    def _weigh(self, report: RoundReport | None, total: float) -> None:
        """Write this rank's part of a weighted sum."""
        if report is None or report.refused:
            self._sum.vector.zero_()  # zero times what is not finite would not be
        else:
            torch.mul(self.outgoing, report.merge_weight / total, out=self._sum.vector)

    def _weigh_node(
        self, report: RoundReport | None, merged: Mapping[int, float], total: float
    ) -> None:
        """Write this rank's part of its node's part of the sum of all nodes."""
        node = None if report is None else self._nodes[report.worker]
        if node in merged:
            self._weigh(report, merged[node] * total / self._counted[node])
        elif node in self._counted and self._nodes.index(node) == report.worker:
            # All of the node's were refused in this round, but not before: once is enough.
            torch.mul(self._pulled, self._counted[node] / total, out=self._sum.vector)
        else:
            self._sum.vector.zero_()
