"""Local SGD with weighted averaging in any loop: ``train.py --sync bsp`` in two lines."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dbsl.base.errors import SettingError, require, require_whole
from dbsl.base.files import write_with
from dbsl.cluster.formats import WorkerSum, message_bytes
from dbsl.cluster.merges import Delta, share_of_mean
from dbsl.cluster.weights import FlatWeights
from dbsl.config.fields import in_words
from dbsl.config.settings import ROUND_WIRES
from dbsl.library.processes import USED, compare, digest, gather, world_size
from dbsl.library.watch import alone, refuse_sharded
from dbsl.optimizer import begin_again, first_state


class Rounds:
    """Every process trains on its own for some steps; then all take the weighted mean.

    Enter it around the loop and call `step` after each optimizer step. On entering, all take
    the weights of process 0, unless a state was loaded: inside its round each has its own. On
    leaving, an unfinished round is merged. Parameters that train and floating-point buffers
    beside them (batch norm's statistics) are merged; tensors that no process trains or has changed
    keep their bits. Weights that do not train are compared on entering, and never sent. Each
    process keeps its own optimizer state. Inside, DDP does not average gradients.

    Weights that are not finite are left out of the mean. That process takes what the others
    merged, and its optimizer is reset.

    Args:
        model: On its device, as the loop calls it: DDP's wrapper, not its module. It keeps its
            tensors, which hold the mean after a merge; means and changes are at least float32.
        optimizer: This process's optimizer.
        every: Steps in a round, at least 1; the same on every process. None: a round ends when
            `merge` is called, after any number of steps on each process, as in dual-batch plans.
        weight: This process's weight in the mean, at least 0, or a function that returns it at each
            merge; None: the same for all. In train.py it is the share of the samples.
        outer: Learning rate and Nesterov momentum of an outer step that replaces the mean, as in
            DiLoCo (arXiv 2311.08105); None: the mean.
        params: What is merged: "trainable", "all", or the parameters themselves.
        wire: Format of matrices sent: float32, bf16, int8, int4 or int2. Shorter formats send the
            change since the last merge, and the rounding error is added in the next round.
        group: The processes; None: all.

    Raises:
        SettingError: Names the argument, its bound and its value.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        every: int | None = 50,
        weight: float | Callable[[], float] | None = None,
        outer: tuple[float, float] | None = None,
        *,
        params: str | Iterable[nn.Parameter] = "trainable",
        wire: str = "float32",
        group: dist.ProcessGroup | None = None,
    ) -> None:
        if every is not None:
            require_whole("every", every, 1, ", or None")
        try:
            lr, momentum = map(float, (1, 0) if outer is None else outer)
        except (TypeError, ValueError):
            lr = momentum = math.nan
        must = "outer must be a finite learning rate above 0 and a momentum in [0, 1)"
        require(0 < lr < math.inf and 0 <= momentum < 1, must, outer)
        require(wire in ROUND_WIRES, f"wire must be {in_words(ROUND_WIRES)}", wire)
        module = isinstance(model, nn.Module)
        require(module, "model must be a torch module", type(model).__name__)
        refuse_sharded(model)
        ddp = (m for m in model.modules() if isinstance(m, DistributedDataParallel))
        fixed = any(module.static_graph for module in ddp)  # no_sync fails before its first step
        require(not fixed, "static_graph of DDP must be False", fixed)
        one = hasattr(optimizer, "param_groups")
        require(one, "optimizer must be one optimizer", type(optimizer).__name__)
        self.every = every
        self.steps = 0  # since the last merge
        self.merges = 0
        self._model, self._optimizer = model, optimizer
        bare = getattr(optimizer, "optimizer", optimizer)  # without Accelerate's wrapping
        # Momentum does not show whether it was loaded; torch's SGD is built without.
        self._first = {} if isinstance(bare, torch.optim.SGD) else first_state(optimizer)
        self._weight, self._group, self._processes = weight, group, world_size(group)
        names = _merged_names(model, params)
        self._weights = FlatWeights(model, apart=True, names=names)  # its vector: as merged last
        trained = len(self._weights.vector) - len(self._weights.buffers)
        self._outer = None if outer is None else Delta(trained, lr, momentum)
        self._wire = wire if self._processes > 1 else "float32"
        self._sum = WorkerSum(self._wire, self._weights, group)
        self._alike = {"every": every, "outer": outer and (lr, momentum), "wire": wire}
        self._inside: ExitStack | None = None
        self._loaded = False

    def __enter__(self) -> Rounds:
        """Take the weights of process 0, or continue from a state."""
        if self._inside is not None:
            raise SettingError("Rounds must be left before it is entered again")
        now = world_size(self._group)
        must = f"Rounds must be built after the process group, which has {now} processes"
        require(now == self._processes, must, self._processes)
        inside = self._loaded or self.steps > 0  # a round is open: each process has its own weights
        weights = self._weights.read()
        begun = "whether a round has begun (by a loaded state, or by steps before an error)"
        alike = {begun: inside, "tensors of model": digest((self._weights.layout, weights.dtype))}
        alike["weights that are not merged"] = digest(self._weights.sums_of_others())
        compare(alike | self._alike, group=self._group)
        if not inside:
            if self._processes > 1:
                dist.broadcast(weights, group=self._group, group_src=0)
            self._weights.load(weights)
        self._loaded, self._inside = False, alone(self._model)
        USED.add("Rounds")
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Merge an unfinished round, unless an error ends the loop."""
        self._inside.close()
        try:
            if kind is None and any(row[1] for row in self._meet(True)):
                self.merge()
        finally:
            self._inside = None

    def step(self) -> bool:
        """Count an optimizer step; return whether the round is over and was merged."""
        self._check_inside()
        self.steps += 1
        if self.every is None or self.steps < self.every:
            return False
        self.merge()
        return True

    @torch.no_grad()
    def merge(self) -> None:
        """End the round now: on every process at the same step, unless `every` is None."""
        self._check_inside()
        own, merged = self._weights.read(), self._weights.vector
        late = self._weights.trained_besides()
        must = "weights that train must be merged: build Rounds once they do, or with params='all'"
        require(late is None, must, late)
        weight = self._weight() if callable(self._weight) else self._weight
        try:
            weight = 1.0 if weight is None else float(weight)
        except (TypeError, ValueError):
            weight = math.nan  # all processes must learn of it
        same = own == self._weights.rounded()  # a constant may be infinite, such as a mask
        finite = bool((same | own.isfinite()).all())
        rows = self._meet(False, weight, finite, self._weights.may_change(same).tolist())
        _, _, given, all_finite, changes = zip(*rows, strict=True)
        fits = all(each >= 0 for each in given) and 0 < sum(given) < math.inf
        require(fits, "weight must be at least 0, and their sum above 0 and finite", given)
        weights = [each if fine else 0.0 for each, fine in zip(given, all_finite, strict=True)]
        total = sum(weights)
        if not total:
            bad = self._weights.first_not_finite(own.masked_fill_(same, 0))
            here = "" if finite else f"; here {self._weights.layout[bad]} is not finite"
            which = "no process of a weight above 0 has finite weights"
            raise FloatingPointError(f"{which}: nothing is left to merge{here}")
        rounds = self._wire != "float32"
        if rounds:  # the change since the last merge travels
            own = own.sub_(merged).masked_fill_(same, 0)
        part = self._sum(share_of_mean(own, weight if finite else 0.0, total))
        if rounds:
            part = part + merged
            if not (part.isfinite() | (part == merged)).all():
                self._sum.forget()
                raise FloatingPointError("changes are too large to be rounded: not finite")
        changed = torch.tensor([*map(any, zip(*changes, strict=True))], device=part.device)
        changed = self._weights.spread(changed)
        part = part.where(changed, merged)
        if self._outer is not None:  # its momentum may move what was frozen since
            part = self._outer(merged, part[None], torch.ones(1)).where(changed, merged)
        self._weights.load(part)
        if not finite:
            warnings.warn(
                f"weights after step {self.steps} of round {self.merges} were not finite: left out",
                stacklevel=3,
            )
            begin_again(self._optimizer, self._first)
        self.steps, self.merges = 0, self.merges + 1

    def state_dict(self) -> dict[str, Any]:
        """Return the round's state; each process saves model and optimizer as usual."""
        return {
            "steps": self.steps,
            "merges": self.merges,
            "merged": self._weights.vector.clone(),
            "outer": self._outer and copy.deepcopy(self._outer.state_dict()),
            "rounded": self._sum.state_dict(),
            "process": self._place(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state_dict` returned; model and optimizer have theirs already.

        Every process loads its own. `wire` may differ; float32 drops the rounding error. A state
        saved at the end of a round fits any number of processes; another number drops it too.
        """
        require(self._inside is None, "a state must be loaded before `with`", "inside it")
        if (self._outer is None) != (state["outer"] is None):
            must = "None" if state["outer"] is None else "a learning rate and a momentum"
            raise SettingError(f"outer must be {must}, as in the state, got the other")
        vector, (own, all_of_it) = self._weights.vector, state["process"]
        left = state["rounded"] if all_of_it == self._processes else None
        must = f"a state must be that of process {self._place()[0]} of {self._processes}"
        moved = all_of_it != self._processes and state["steps"] == 0
        # Accelerate's register_for_checkpointing saves only that of process 0: all refuse it.
        others = (own, all_of_it) != self._place() and not moved
        compare({}, f"{must}, got that of process {own} of {all_of_it}" * others, self._group)
        saved = len(state["merged"])
        require(saved == len(vector), f"a state must have {len(vector)} weights", saved)
        self.steps, self.merges = state["steps"], state["merges"]
        vector.copy_(state["merged"])
        if self._outer is not None:
            self._outer.load_state_dict(copy.deepcopy(state["outer"]))
        self._sum.load_state_dict(copy.deepcopy(left))
        self._loaded = True

    def save(self, folder: str | Path) -> None:
        """Write the merged part of the model, the optimizer and the round, one file per process."""
        state = {"model": self._weights.tensors_by_name(), "rounds": self.state_dict()}
        state["optimizer"] = self._optimizer.state_dict()
        path = self._file(folder)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_with(path, lambda temporary: torch.save(state, temporary))

    @torch.no_grad()
    def load(self, folder: str | Path) -> None:
        """Continue from what `save` wrote; every process reads its own file, before `with`."""
        path = self._file(folder)
        require(path.is_file(), f"{path} must be there, as save writes it", "no such file")
        state = torch.load(path, map_location="cpu", weights_only=True)
        kept = self._weights.tensors_by_name()
        alike = kept.keys() == state["model"].keys()
        require(alike, f"model must have the tensors that {path} has", "others")
        for name, tensor in kept.items():
            tensor.copy_(state["model"][name])
        self._optimizer.load_state_dict(state["optimizer"])
        self.load_state_dict(state["rounds"])

    @property
    def bytes_per_merge(self) -> int:
        """Bytes that a process adds to a merge."""
        matrices, rest = map(len, self._weights.split(self._weights.vector))
        return message_bytes(self._wire, matrices, rest, self._weights.vector.itemsize)

    def _check_inside(self) -> None:
        if self._inside is None:
            raise SettingError("step and merge must be called inside `with Rounds(...)`")

    def _place(self) -> tuple[int, int]:
        """Return this process's rank in the group, and the group's size."""
        rank = dist.get_rank(self._group) if self._processes > 1 else 0
        return rank, self._processes

    def _file(self, folder: str | Path) -> Path:
        return Path(folder) / f"rounds-{self._place()[0]}.pt"

    def _meet(self, leaving: bool, *told: Any) -> list[list[Any]]:
        """Return every process's row; all must be at the same place in the loop."""
        rows = gather([leaving, self.steps, *told], self._group)
        places = [(left, steps) for left, steps, *_ in rows]
        compared = places if self.every else [left for left, _ in places]
        if len({*compared}) > 1:
            raise SettingError(
                "step and merge must be called equally often on every process, got (whether the "
                f"loop is left, steps of the round) {places}"
            )
        return rows


def _merged_names(model: nn.Module, params: str | Iterable[nn.Parameter]) -> set[str] | None:
    """Return the names of tensors to merge; None: all."""
    if isinstance(params, str):
        require(params in ("trainable", "all"), "params must be trainable or all", params)
        if params == "all":
            return None
        chosen = {id(p) for p in model.parameters() if p.requires_grad}
    else:
        chosen = {id(p) for p in params}
        unknown = chosen - {id(p) for p in model.parameters()}
        require(not unknown, "params must be parameters of model", f"{len(unknown)} others")
    names = {name for name, p in model.named_parameters() if id(p) in chosen}
    for place, module in model.named_modules():
        own = [*module.parameters(recurse=False)]
        if not own or any(id(p) in chosen for p in own):  # statistics without weights, too
            names |= {n for n, _ in module.named_buffers(place, recurse=False)}
    return names
