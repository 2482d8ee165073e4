"""Rounds in which each node of simulated workers merges by itself; all nodes merge at some."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from dbsl.cluster.server import Server
from dbsl.plan.turns import Restart, RoundReport, nodes_meet


class NodeServer(Server):
    """A server at a barrier whose global weights change when all nodes merge.

    After each round the weights of a node become the mean of its workers', weighted by f_i. Where
    all nodes meet, the mean of the nodes, weighted by the sum of all f_i that they have merged
    since they last met, goes to the merge rule, and every node goes on with what comes of it. A
    node without a worker in between counts with what it had.

    Args:
        weights: As for `Server`, like all that is not named here.
        workers: As for `Server`.
        nodes: The node of each worker.
        node_rounds: Rounds of an epoch after which all nodes merge, as they do at its end.
    """

    def __init__(
        self,
        weights: Tensor,
        workers: int,
        *,
        nodes: Sequence[int],
        node_rounds: int,
        **common: Any,
    ) -> None:
        super().__init__(weights, workers, **common)
        self._nodes, self._node_rounds = tuple(nodes), node_rounds
        self._sums: dict[int, tuple[Tensor, float]] = {}  # the open round's, by node
        self._held: dict[int, Tensor] = {}  # weights of nodes since all have met
        self._counted: dict[int, float] = {}  # their f_i since then
        self._round = 0  # the one that is collected, within its epoch

    def pull(self, worker: int) -> Tensor:
        """Return the weights of a worker's node, not to be written to."""
        weights = super().pull(worker)
        held = self._held.get(self._nodes[worker])
        if held is None:
            return weights
        self.release(weights)
        return held

    def state_dict(self) -> dict[str, Any]:
        """Return everything that a later `load_state_dict` needs to go on alike."""
        nodes = {
            "sums": dict(self._sums),
            "held": dict(self._held),
            "counted": dict(self._counted),
            "round": self._round,
        }
        return super().state_dict() | {"nodes": nodes}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` returned."""
        super().load_state_dict(state)
        nodes, device = state["nodes"], self._weights.device
        self._round = nodes["round"]
        self._sums = {node: (s.to(device), weight) for node, (s, weight) in nodes["sums"].items()}
        self._held = {node: held.to(device) for node, held in nodes["held"].items()}
        self._counted = dict(nodes["counted"])

    def restart(self, start: Restart) -> None:
        """Go on with the weights of other workers, all workers at the same clock."""
        super().restart(start)
        for state in (self._sums, self._held, self._counted):
            state.clear()

    @torch.no_grad()
    def _collect(self, weights: Tensor, report: RoundReport) -> None:
        """Keep a push until all workers have pushed."""
        node = self._nodes[report.worker]
        if not report.refused:
            sum_, weight = self._sums.get(node) or (torch.zeros_like(weights), 0.0)
            sum_.add_(weights, alpha=report.merge_weight)
            self._sums[node] = sum_, weight + report.merge_weight
        self._round = report.round
        self._collected += 1

    def _merge_collected(self) -> None:
        """Make one update of the pushes that a barrier has collected: in the nodes, or of all."""
        for node, (sum_, weight) in self._sums.items():
            self._held[node] = sum_.div_(weight)
            self._counted[node] = self._counted.get(node, 0.0) + weight
        self._sums.clear()
        self._collected = 0
        self.version += 1
        if nodes_meet(self._round, self._node_rounds, self.rounds_per_epoch):
            if self._held:  # else all were refused, and the weights stay
                self._take_mean(mean_of_nodes(self._held, self._counted))
            self._held.clear()
            self._counted.clear()


def mean_of_nodes(held: Mapping[int, Tensor], counted: Mapping[int, float]) -> Tensor:
    """Return the mean of nodes' weights, each by the f_i that it has merged."""
    total = sum(counted[node] for node in sorted(held))
    return sum(held[node] * (counted[node] / total) for node in sorted(held))
