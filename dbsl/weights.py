"""A model's floating-point state as one vector: a merge or a transfer is then one operation."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class FlatWeights:
    """One vector that holds a model's parameters and floating-point buffers.

    The model's tensors become views into it: reading `vector` costs no copy, writing to it changes
    the model. Integer buffers (batch norm's step counter) are left with the model. Call it after
    the model is on its device and in its dtype, and before an optimizer is built on it.
    """

    def __init__(self, model: nn.Module) -> None:
        tensors = list(_floating_tensors(model))
        kinds = {(t.dtype, t.device) for t in tensors}
        if len(kinds) != 1:
            raise ValueError(
                f"model must have one dtype and one device, got {sorted(map(str, kinds))}"
            )
        dtype, device = kinds.pop()
        self.vector = torch.empty(sum(t.numel() for t in tensors), dtype=dtype, device=device)
        self._parameters = list(model.parameters())
        trained = sum(p.numel() for p in self._parameters)
        self.buffers = self.vector[trained:]  # a view: batch norm's statistics
        offset = 0
        with torch.no_grad():
            for tensor in tensors:
                flat = self.vector[offset : offset + tensor.numel()]
                view = _view_like(flat, tensor)
                view.copy_(tensor)
                tensor.data = view
                offset += tensor.numel()

    @torch.no_grad()
    def load(self, weights: Tensor) -> None:
        """Copy a vector of the same length, from any device, into the model."""
        self.vector.copy_(weights)

    def attach_gradients(self, vector: Tensor) -> None:
        """Make a vector in the layout of the weights hold the gradients of the parameters."""
        offset = 0
        for parameter in self._parameters:
            flat = vector[offset : offset + parameter.numel()]
            parameter.grad = _view_like(flat, parameter)
            offset += parameter.numel()


def _floating_tensors(model: nn.Module):
    yield from model.parameters()
    yield from (b for b in model.buffers() if b.is_floating_point())


def _view_like(flat: Tensor, tensor: Tensor) -> Tensor:
    """View a flat piece in the tensor's shape and memory order (channels_last is kept)."""
    if tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last):
        n, c, h, w = tensor.shape
        return flat.view(n, h, w, c).permute(0, 3, 1, 2)
    return flat.view(tensor.shape)
