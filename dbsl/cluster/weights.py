"""A model's floating-point state as one vector, and compilation of the model.

With one vector a merge or a transfer is one operation. Compiled graphs keep its address.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._triton import has_triton

from dbsl.base.errors import SettingError, require

# In numbers. Kernels read tensors faster at addresses that are multiples of 16 bytes. Compiled ones
# (Inductor) assume aligned parameters without checking; the bits of sums depend on it, too.
ALIGNMENT = 64


class FlatWeights:
    """One vector that holds a model's parameters and floating-point buffers.

    The model's `tensors` become views into it: reading `vector` makes no copy, writing to it
    changes the model. Each starts at a multiple of `ALIGNMENT` numbers; the gaps hold zeros. Build
    it after the model is on its device and in its dtype, and before the model is compiled or an
    optimizer is built on it.
    `vector`, [P], has parameters, then floating-point `buffers` (batch norm's statistics). It omits
    the model's other buffers, `counters` (batch norm's step counters), and those that the model
    does not save: constants, such as a mask with -inf.

    With `names`, the vector has only these tensors.
    With `apart`, the model keeps its own tensors: `read` copies them, `load` copies back, and
    `vector` is what was loaded last. It is at least float32, so that the mean of equal bfloat16
    numbers is that number.
    """

    def __init__(
        self, model: nn.Module, *, apart: bool = False, names: Collection[str] | None = None
    ) -> None:
        self._names = names
        self.tensors = tensors = list(self._now(model).values())
        kinds = {
            (torch.promote_types(t.dtype, torch.float32) if apart else t.dtype, t.device)
            for t in tensors
        }
        shown = ", ".join(sorted(f"{dtype} on {device}" for dtype, device in kinds)) or "none"
        require(len(kinds) == 1, "model must have one dtype and one device", shown)
        dtype, device = kinds.pop()
        require(not dtype.is_complex, "model must have real numbers", shown)
        self._model, self._apart, self.layout = model, apart, _layout(self._now(model))
        self.vector = torch.zeros(_padded_length(tensors), dtype=dtype, device=device)
        self._parameters = [p for p in tensors if isinstance(p, nn.Parameter)]
        self.buffers = self.vector[_padded_length(self._parameters) :]
        self.counters = [b for b in model.buffers() if not b.is_floating_point()]
        self._lengths = [_padded(tensor.numel()) for tensor in tensors]
        self._matrices = [
            isinstance(tensor, nn.Parameter) and tensor.dim() > 1 for tensor in tensors
        ]
        with torch.no_grad():
            for tensor, view in _views(self.vector, tensors):
                view.copy_(tensor)
                if not apart:
                    tensor.data = view
        self._addresses = [tensor.data_ptr() for tensor in tensors]
        self._modules: list[nn.Module] = []
        self._checked: list[int] = []  # result of `_places` when all tensors were last in place

    def _now(self, model: nn.Module) -> dict[str, Tensor]:
        """Return the model's tensors by name: all that may have fractions, or those in `names`."""
        found = _floating(model)
        return found if self._names is None else {n: found[n] for n in found if n in self._names}

    @torch.no_grad()
    def load(self, weights: Tensor) -> None:
        """Copy a vector of the same length, from any device, into the model."""
        self.vector.copy_(weights)
        if self._apart:
            for tensor, view in _views(self.vector, self._now(self._model).values()):
                tensor.copy_(view)

    @torch.no_grad()
    def read(self) -> Tensor:
        """Return a copy of the model's weights, [P].

        Raises:
            SettingError: The model has other tensors than at first.
        """
        if (now := _layout(self._now(self._model))) != self.layout:
            other = sorted({*now} ^ {*self.layout}) or ["another order"]
            must = "model must keep its tensors, their shapes and their order"
            raise SettingError(f"{must}, got {other[0]}")
        vector = torch.zeros_like(self.vector)
        for tensor, view in _views(vector, self._now(self._model).values()):
            view.copy_(tensor)
        return vector

    def rounded(self) -> Tensor:
        """Return `vector` as the model's own dtypes hold it, [P]."""
        vector = self.vector.clone()
        for tensor, view in _views(vector, self._now(self._model).values()):
            view.copy_(view.to(tensor.dtype))
        return vector

    def tensors_by_name(self) -> dict[str, Tensor]:
        """Return the model's own tensors that the vector has."""
        return {name: tensor.detach() for name, tensor in self._now(self._model).items()}

    def trained_besides(self) -> str | None:
        """Return the name of a trained parameter that is not in the vector."""
        held = self._now(self._model)
        named = self._model.named_parameters()
        return next((n for n, p in named if p.requires_grad and n not in held), None)

    def sums_of_others(self) -> list[tuple[str, int]]:
        """Return a sum over the bytes of each parameter that is not in the vector."""
        held = self._now(self._model)
        return [
            (name, int(p.detach().contiguous().flatten().view(torch.uint8).sum(dtype=torch.int64)))
            for name, p in self._model.named_parameters()
            if name not in held
        ]

    def check_views(self) -> None:
        """Refuse a model's tensor that has left the vector: nothing would merge or save it."""
        if self._checked and self._places() == self._checked:
            return
        for (name, tensor), address in zip(
            self._now(self._model).items(), self._addresses, strict=False
        ):
            if tensor.numel() and tensor.data_ptr() != address:
                raise SettingError(f"model must change {name} in place, got another tensor")
        self._modules = list(self._model.modules())
        self._checked = self._places()

    def _places(self) -> list[int]:
        """Return values that differ once the model has another tensor: checking names is slow."""
        held = (own for m in self._modules for own in (m._modules, m._parameters, m._buffers))
        found = [id(one) for own in held for one in own.values()]
        return found + [tensor.data_ptr() for tensor in self.tensors]

    def first_not_finite(self, vector: Tensor) -> int | None:
        """Return the index of the first tensor that is not finite in a vector of this layout."""
        finite = [bool(view.isfinite().all()) for _, view in _views(vector, self.tensors)]
        return None if all(finite) else finite.index(False)

    def may_change(self, same: Tensor) -> Tensor:
        """Return which tensors are trained, or have numbers that are not the `same`, uint8 [T]."""
        trained = [tensor.requires_grad for tensor in self._now(self._model).values()]
        differ = torch.stack([~piece.all() for piece in same.split(self._lengths)])
        return (differ | torch.tensor(trained, device=same.device)).to(torch.uint8)

    def frozen(self) -> Tensor | None:
        """Return which numbers belong to frozen parameters, bool [P]; None: none do."""
        frozen = [isinstance(t, nn.Parameter) and not t.requires_grad for t in self.tensors]
        if not any(frozen):
            return None
        return self.spread(torch.tensor(frozen, device=self.vector.device))

    def spread(self, values: Tensor) -> Tensor:
        """Return a value for each number, [P], from one for each tensor, [T]."""
        return values.repeat_interleave(torch.tensor(self._lengths, device=values.device))

    def split(self, vector: Tensor) -> tuple[Tensor, Tensor]:
        """Return copies of a vector's matrices, concatenated, and of the rest."""
        kinds: tuple[list[Tensor], ...] = ([vector[:0]], [vector[:0]])
        for piece, matrix in zip(vector.split(self._lengths), self._matrices, strict=True):
            kinds[not matrix].append(piece)
        return torch.cat(kinds[0]), torch.cat(kinds[1])

    def join(self, matrices: Tensor, rest: Tensor) -> Tensor:
        """Return the vector that `split` was given."""
        pieces, taken = [], [0, 0]
        for length, matrix in zip(self._lengths, self._matrices, strict=True):
            start = taken[matrix]
            pieces.append((matrices if matrix else rest)[start : start + length])
            taken[matrix] += length
        return torch.cat(pieces)

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Restore weights and counters on exit."""
        state = (self.vector, *self.counters)
        before = [tensor.clone() for tensor in state]
        try:
            yield
        finally:
            for tensor, value in zip(state, before, strict=True):
                tensor.copy_(value)

    def attach_gradients(self, vector: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Make a vector in the layout of the weights hold the gradients of the parameters.

        Frozen parameters have none: with zeros, optimizers would decay them. Returns every
        parameter with its place in the vector.
        """
        places = [*_views(vector, self._parameters)]
        for parameter, view in places:
            parameter.grad = view if parameter.requires_grad else None
        return places


def _layout(tensors: Mapping[str, Tensor]) -> list[str]:
    """Return name, shape and memory order of each tensor."""
    return [
        f"{name} {[*tensor.shape]}{' channels last' * _is_channels_last(tensor)}"
        for name, tensor in tensors.items()
    ]


def vector_length(model: nn.Module) -> int:
    """Return the length of the vector that holds a model's weights."""
    return _padded_length(_floating(model).values())


def names_of(model: nn.Module) -> list[str]:
    """Return the names of the tensors in the vector that holds a model's weights."""
    return list(_floating(model))


def _floating(model: nn.Module) -> dict[str, Tensor]:
    unsaved = {
        f"{place}.{name}" if place else name
        for place, module in model.named_modules()
        for name in module._non_persistent_buffers_set
    }
    buffers = {n: b for n, b in model.named_buffers() if b.is_floating_point() and n not in unsaved}
    return {n: p for n, p in model.named_parameters() if _has_fractions(p)} | buffers


def _has_fractions(tensor: Tensor) -> bool:
    """Whether it can be trained, unlike a quantised layer's packed integers."""
    return tensor.is_floating_point() or tensor.is_complex()


def _is_channels_last(tensor: Tensor) -> bool:
    return tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last)


def _padded(count: int) -> int:
    return -(-count // ALIGNMENT) * ALIGNMENT


def _padded_length(tensors: Iterable[Tensor]) -> int:
    return sum(_padded(tensor.numel()) for tensor in tensors)


def _views(vector: Tensor, tensors: Iterable[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield each tensor with its place in the vector, in the tensor's shape and memory order."""
    offset = 0
    for tensor in tensors:
        flat = vector[offset : offset + tensor.numel()]
        if _is_channels_last(tensor):
            n, c, h, w = tensor.shape
            yield tensor, flat.view(n, h, w, c).permute(0, 3, 1, 2)
        else:
            yield tensor, flat.view(tensor.shape)
        offset += _padded(tensor.numel())


@contextmanager
def kept_modes(model: nn.Module) -> Iterator[None]:
    """Restore each module's mode, training or evaluation, on exit."""
    before = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        for module, mode in before:
            module.training = mode


_MOST_GRAPHS = 64  # in a run; further shapes run uncompiled


def compiles(config: Any, device: torch.device) -> bool | str:
    """Whether a config compiles models; auto: on CUDA, if torch can and sizes do not change.

    A text is the name of torch's backend.
    """
    on_cuda = device.type == "cuda"
    if config.compile == "cudagraphs":
        return on_cuda and config.compile
    if config.compile != "auto":
        return config.compile
    changes = getattr(config, "balance", "none") != "none"  # a config for measuring only has none
    return on_cuda and not changes and has_triton()


def graphs_made() -> int:
    """Return how many graphs this process has compiled so far."""
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def compile_in_place(
    model: nn.Module, device: torch.device, how: bool | str = True, *, sums: bool = False
) -> None:
    """Compile a model's calls, once for each shape of its input; `how` is what `compiles` returns.

    On CUDA, the graphs are recorded as CUDA graphs, which save small batches the launch of every
    kernel; not if gradients of several calls are summed (`sums`), since a recorded graph's next
    call overwrites what its last one returned. Code that cannot compile runs as is: torch warns.
    """
    torch._dynamo.config.recompile_limit = _MOST_GRAPHS
    torch._dynamo.config.suppress_errors = True
    if isinstance(how, str):
        model.compile(dynamic=False, backend=how)
        return
    records = device.type == "cuda" and not sums
    model.compile(dynamic=False, mode="reduce-overhead" if records else "default")


def uncompiled(model: nn.Module) -> AbstractContextManager:
    """Keep a compiled model from being compiled for another batch size, inside the result."""
    if all(module._compiled_call_impl is None for module in model.modules()):
        return nullcontext()  # the one below takes a second to import
    return torch.compiler.set_stance("force_eager")
