"""Operators of torch_npu that stand between ``aten`` and the device: backwards, casts, dropout.

torch_npu's own autograd formulas and Python functions call them for plain torch code, so they are
computed here; fused operators are the plugins' business.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torchtitan_npu_core.testing.virtual_npu import attention, random

_BYTES_BITS = 128
"""Dropout masks hold one bit per element and come in blocks of this many bits."""


def _same_format(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    # a storage layout of the device's; all memory here is plain
    return x.clone()


def _cast(x: Tensor, dtype: torch.dtype, *args: Any) -> Tensor:
    return x.to(dtype, copy=True)


def gather_backward(
    grad: Tensor, size: list[int], dim: int, index: Tensor, sparse_grad: bool
) -> Tensor:
    """Gradient of ``torch.gather``, shape ``size``."""
    return grad.new_zeros(size).scatter_add_(dim, index, grad)


def _select_backward(
    grad: Tensor, dim: int, indices: Tensor, sizes: list[int], keepdim: bool
) -> Tensor:
    if not keepdim and sizes:
        grad, indices = grad.unsqueeze(dim), indices.unsqueeze(dim)
    return grad.new_zeros(sizes).scatter_(dim, indices, grad)


def repeat_interleave_backward(
    grad: Tensor, input: Tensor, repeats: Any, dim: int | None = None
) -> Tensor:
    """Gradient of ``torch.repeat_interleave``, shape of ``input``."""
    flat = input if dim is not None else input.reshape(-1)
    axis = 0 if dim is None else dim
    index = torch.arange(flat.shape[axis]).repeat_interleave(repeats)
    summed = grad.new_zeros(flat.shape).index_add_(axis, index, grad)
    return summed.reshape(input.shape)


def _one_(x: Tensor) -> Tensor:
    return x.fill_(1)


def _copy_memory_(x: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    return x.copy_(source)


def _pack(kept: Tensor) -> Tensor:
    bits = kept.new_zeros(-(-kept.numel() // _BYTES_BITS) * _BYTES_BITS)
    bits[: kept.numel()] = kept.reshape(-1)
    weights = 2 ** torch.arange(8, dtype=torch.uint8)
    return (bits.view(-1, 8).to(torch.uint8) * weights).sum(-1, dtype=torch.uint8)


def _unpack(mask: Tensor, like: Tensor) -> Tensor:
    bits = mask[:, None] >> torch.arange(8, dtype=torch.uint8) & 1
    return bits.reshape(-1)[: like.numel()].view(like.shape).bool()


def dropout(x: Tensor, p: float) -> tuple[Tensor, Tensor]:
    """Zero each element with probability ``p``, scale the others; also the bit mask."""
    kept = torch.empty(x.shape).bernoulli_(1 - p, generator=random.draw(None)).bool()
    return dropout_backward(x, _pack(kept), p), _pack(kept)


def dropout_backward(grad: Tensor, mask: Tensor, p: float) -> Tensor:
    """Apply the mask and scale of a forward to its gradient."""
    return torch.where(_unpack(mask, grad), grad / (1 - p) if p < 1 else 0, 0).to(grad.dtype)


TWINS: dict[str, Callable[..., Any]] = {
    "npu_dtype_cast": _cast,
    "_npu_dtype_cast": _cast,
    "npu_dtype_cast_backward": _cast,
    "_npu_dtype_cast_backward": _cast,
    "npu_format_cast": _same_format,
    "npu_format_cast.Tensor": _same_format,
    "_npu_format_cast": _same_format,
    "_npu_format_cast.aclnn": _same_format,
    "_npu_format_cast.input_dtype": _same_format,
    "npu_gather_backward": gather_backward,
    "npu_max_backward": _select_backward,
    "npu_min_backward": _select_backward,
    "repeat_interleave_backward_int": repeat_interleave_backward,
    "repeat_interleave_backward_tensor": repeat_interleave_backward,
    "one_": _one_,
    "copy_memory_": _copy_memory_,
    "_npu_dropout": dropout,
    "npu_dropout_backward": dropout_backward,
    **attention.KERNELS,
}
"""CPU kernels by the name of an operator in the ``npu`` namespace, overload included."""
