"""The scaled GELU operators: argument checks, fake kernels, autograd, sharding rules.

They are called as ``torch.ops.acme.scaled_gelu`` and ``torch.ops.acme.scaled_gelu_backward``.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torchtitan_npu_core.errors import OperatorArgumentError
from torchtitan_npu_core.operators import OperatorKernels

from acme_torchtitan_npu_gelu import reference

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
"""Dtypes the operators take."""


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _check(operator: str, input: Tensor, scale: float) -> None:
    if input.dtype not in DTYPES:
        known = ", ".join(_short(dtype) for dtype in DTYPES)
        raise OperatorArgumentError(
            f"{operator}: input {tuple(input.shape)} is {_short(input.dtype)}; it must be one of "
            f"{known}. Cast it first"
        )
    if not math.isfinite(scale):
        raise OperatorArgumentError(f"{operator}: scale is {scale}, it must be a finite number")


def check_scaled_gelu(input: Tensor, scale: float = 1.0) -> None:
    """Refuse what the kernel refuses; see ``reference.scaled_gelu`` for the arguments.

    Raises:
        OperatorArgumentError: If the dtype is not one of ``DTYPES``, or ``scale`` is infinite or
            not a number.

    Source:
        Gaussian Error Linear Units (arXiv 1606.08415), section 2; torch.nn.GELU (torch 2.13.0).
    """
    _check("scaled_gelu", input, scale)


def check_scaled_gelu_backward(grad: Tensor, input: Tensor, scale: float = 1.0) -> None:
    """Refuse what the kernel refuses; see ``reference.scaled_gelu_backward`` for the arguments.

    Raises:
        OperatorArgumentError: As for the forward, or if grad and input differ in shape or dtype.

    Source:
        Derivative of ``scaled_gelu``: Gaussian Error Linear Units (arXiv 1606.08415), section 2;
        torch.nn.GELU (torch 2.13.0).
    """
    _check("scaled_gelu_backward", input, scale)
    if grad.shape != input.shape or grad.dtype != input.dtype:
        raise OperatorArgumentError(
            f"scaled_gelu_backward: grad is {tuple(grad.shape)} {_short(grad.dtype)}, input is "
            f"{tuple(input.shape)} {_short(input.dtype)}; they must agree"
        )


def _measure(input: Tensor, scale: float = 1.0) -> dict[str, Any]:
    return {"input_dims": input.dim()}


def _measure_backward(grad: Tensor, input: Tensor, scale: float = 1.0) -> dict[str, Any]:
    return _measure(input, scale)


def _fake(input: Tensor, scale: float = 1.0) -> Tensor:
    # not empty_like: that keeps the strides of its argument, the kernels return contiguous tensors
    return torch.empty(input.shape, dtype=input.dtype, device=input.device)


def _fake_backward(grad: Tensor, input: Tensor, scale: float = 1.0) -> Tensor:
    return _fake(input, scale)


def _setup_context(ctx: Any, inputs: Any, output: Any) -> None:
    input, scale = inputs
    ctx.scale = scale
    # the input, not the output: GELU is not monotonic, so its output does not tell where it was
    ctx.save_for_backward(input)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    (input,) = ctx.saved_tensors
    return torch.ops.acme.scaled_gelu_backward(grad, input, ctx.scale), None


def _shard(input: Any, scale: float = 1.0) -> list[Any]:
    from torch.distributed.tensor import Replicate, Shard

    # every element stands alone, so any dim may be split; unsummed parts may not come in, because
    # the function of a sum is not the sum of the function
    rules: list[Any] = [([Replicate()], [Replicate(), None])]
    rules += [([Shard(dim)], [Shard(dim), None]) for dim in range(len(input.shape))]
    return rules


def _shard_backward(grad: Any, input: Any, scale: float = 1.0) -> list[Any]:
    return [(outputs, [outputs[0], *inputs]) for outputs, inputs in _shard(input, scale)]


SCALED_GELU = OperatorKernels(
    reference=reference.scaled_gelu,
    fake=_fake,
    check=check_scaled_gelu,
    measure=_measure,
    setup_context=_setup_context,
    backward=_backward,
    sharding=_shard,
)
# no formula of its own: a second derivative raises instead of being lost
SCALED_GELU_BACKWARD = OperatorKernels(
    reference=reference.scaled_gelu_backward,
    fake=_fake_backward,
    check=check_scaled_gelu_backward,
    measure=_measure_backward,
    sharding=_shard_backward,
)
