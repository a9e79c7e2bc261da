"""Tensors on device ``npu`` seen as CPU tensors of the same memory, and the other way round."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor


def host(value: Any) -> Any:
    """CPU tensor that shares the memory of an npu tensor; CPU for the device; others unchanged.

    The result has the size, strides, offset and conjugate and negative bits of ``value``. It does
    not keep the memory alive.
    """
    if isinstance(value, Tensor):
        return _alias(value) if value.device.type == "npu" else value
    if isinstance(value, torch.device):
        return torch.device("cpu") if value.type == "npu" else value
    return value


def _alias(tensor: Tensor) -> Tensor:
    storage = tensor.untyped_storage()
    if storage.nbytes() == 0:
        return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="cpu")
    memory = torch._C._construct_storage_from_data_pointer(
        storage.data_ptr(), torch.device("cpu"), storage.nbytes()
    )
    # torch calls kernels from C++ too, where the caller's default device still counts
    alias = torch.empty(0, dtype=tensor.dtype, device="cpu")
    alias.set_(memory, tensor.storage_offset(), tensor.size(), tensor.stride())  # type: ignore[arg-type]
    if tensor.is_conj():
        alias = alias.conj()
    return torch._neg_view(alias) if tensor.is_neg() else alias


def raw_empty(
    size: Any, stride: Any, dtype: torch.dtype, device: torch.device | str = "npu"
) -> Tensor:
    """New npu tensor whose memory nobody has written."""
    extent = 1 + sum((n - 1) * s for n, s in zip(size, stride, strict=True))
    numel = extent if math.prod(size) else 0
    # a factory of torch_npu's own, which stays below whatever is registered for aten's
    flat = torch.ops.npu.empty_with_format.default(
        [numel], dtype=dtype, layout=None, device=torch.device(device), pin_memory=None
    )
    with torch._C._AutoDispatchBelowAutograd():
        return flat.as_strided(size, stride)


def device(value: Any, like: torch.device | str = "npu") -> Any:
    """New npu tensor with the values and layout of a CPU tensor; others unchanged.

    So is a CPU tensor if ``like`` is not an npu device.
    """
    if not isinstance(value, Tensor) or value.device.type != "cpu":
        return value
    if torch.device(like).type != "npu":
        return value
    value = value.resolve_conj().resolve_neg()
    stride = value.stride()
    if not torch._prims_common.is_non_overlapping_and_dense_or_false(value):
        stride = torch._prims_common.make_contiguous_strides_for(value.shape)
    made = raw_empty(value.size(), stride, value.dtype, like)
    if value.numel():
        _alias(made).copy_(value)
    return made


def poison(tensor: Tensor) -> Tensor:
    """Fill an npu tensor with what a wrong reader notices: NaN, or an index far out of range."""
    if tensor.numel():
        alias = _alias(tensor)
        if alias.is_floating_point() or alias.is_complex():
            alias.fill_(float("nan"))
        elif alias.dtype is torch.bool:
            alias.fill_(True)
        else:
            alias.fill_(torch.iinfo(alias.dtype).min or torch.iinfo(alias.dtype).max)
    return tensor
