"""Nested state as JSON and tensors, lossless and without pickle.

Pure. Dicts, lists, tuples, numbers, strings, None and tensors go in and come back equal, to the
bit; a tensor that occurs more than once is kept once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dbsl.base.errors import SettingError

_PLAIN = (bool, int, float, str, type(None))
_TENSOR, _TUPLE, _PAIRS = "__tensor__", "__tuple__", "__pairs__"


def pack(state: Any) -> tuple[Any, dict[str, Tensor]]:
    """Return a tree for JSON and the tensors it names, copied to host memory.

    The copies are contiguous and in the order of the dimensions; equal tensors on equal memory
    share one.

    Raises:
        TypeError: If the state holds anything else.
    """
    tensors: dict[str, Tensor] = {}
    names: dict[tuple, str] = {}

    def walk(value: Any) -> Any:
        if isinstance(value, Tensor):
            key = (value.data_ptr(), value.shape, value.stride(), value.dtype, value.device)
            if not value.numel() or key not in names:
                names[key] = str(len(tensors))
                tensors[names[key]] = _host_copy(value)
            return {_TENSOR: names[key]}
        if isinstance(value, _PLAIN):
            return value
        if isinstance(value, list):
            return [walk(item) for item in value]
        if isinstance(value, tuple):
            return {_TUPLE: [walk(item) for item in value]}
        if isinstance(value, dict):
            if all(isinstance(key, str) for key in value):
                return {key: walk(item) for key, item in value.items()}
            return {_PAIRS: [[walk(key), walk(item)] for key, item in value.items()]}
        raise TypeError(f"state must be of plain values and tensors, got {type(value).__name__}")

    return walk(state), tensors


def unpack(tree: Any, tensors: dict[str, Tensor]) -> Any:
    """Return the state that `pack` was given, its tensors in host memory.

    Raises:
        SettingError: If the tree is none that `pack` makes.
    """
    if isinstance(tree, list):
        return [unpack(item, tensors) for item in tree]
    if not isinstance(tree, dict):
        return tree
    if set(tree) == {_TENSOR}:
        if tree[_TENSOR] not in tensors:
            raise SettingError(f"state must name tensors that are there, got {tree[_TENSOR]!r}")
        return tensors[tree[_TENSOR]]
    try:
        if set(tree) == {_TUPLE}:
            return tuple(unpack(item, tensors) for item in tree[_TUPLE])
        if set(tree) == {_PAIRS}:
            return {unpack(k, tensors): unpack(v, tensors) for k, v in tree[_PAIRS]}
    except (TypeError, ValueError) as error:
        raise SettingError(f"state must be a tree as it was packed ({error})") from None
    return {key: unpack(item, tensors) for key, item in tree.items()}


def _host_copy(tensor: Tensor) -> Tensor:
    copy = torch.empty(tensor.shape, dtype=tensor.dtype)  # contiguous, as safetensors wants it
    return copy.copy_(tensor.detach())
