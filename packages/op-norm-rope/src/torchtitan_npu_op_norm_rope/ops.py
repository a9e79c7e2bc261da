"""The norm and rotary operators: argument checks, fake kernels, autograd, sharding rules.

They are called as ``torch.ops.npu.npu_rms_norm`` and ``torch.ops.npu.npu_rotary_mul``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchtitan_npu_core.errors import OperatorArgumentError
from torchtitan_npu_core.operators import OperatorKernels
from torchtitan_npu_op_norm_rope import reference

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32

RMS_NORM_DTYPES = ((FP16, FP32), (BF16, FP32), (FP16, FP16), (BF16, BF16), (FP32, FP32))
"""Pairs of input and gamma dtype that the device takes."""

ROTARY_MODES = ("half", "interleave", "quarter", "interleave-half")


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# ---------------------------------------------------------------- rms norm


def check_rms_norm(input: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> None:
    """Refuse what the device refuses; see ``reference.rms_norm`` for the arguments.

    Raises:
        OperatorArgumentError: Naming shapes or dtypes.
    """
    if gamma.dim() == 0 or gamma.dim() > input.dim():
        raise OperatorArgumentError(
            f"npu_rms_norm: gamma has {gamma.dim()} dims, input has {input.dim()}; gamma needs at "
            f"least one and at most as many as input"
        )
    if input.shape[input.dim() - gamma.dim() :] != gamma.shape:
        raise OperatorArgumentError(
            f"npu_rms_norm: gamma {tuple(gamma.shape)} does not match the trailing dims of input "
            f"{tuple(input.shape)}"
        )
    if (input.dtype, gamma.dtype) not in RMS_NORM_DTYPES:
        pairs = ", ".join(f"{_short(i)}/{_short(g)}" for i, g in RMS_NORM_DTYPES)
        raise OperatorArgumentError(
            f"npu_rms_norm: input {_short(input.dtype)} with gamma {_short(gamma.dtype)} is not "
            f"supported; input/gamma must be one of {pairs}. Cast one of them"
        )
    if not epsilon >= 0:
        raise OperatorArgumentError(f"npu_rms_norm: epsilon is {epsilon}, it must not be negative")


def _measure_rms_norm(input: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> dict[str, Any]:
    return {"input_dims": input.dim()}


def _fake_rms_norm(input: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    lead = input.shape[: input.dim() - gamma.dim()]
    y = torch.empty(input.shape, dtype=input.dtype, device=input.device)
    return y, input.new_empty((*lead, *[1] * gamma.dim()), dtype=FP32)


def _setup_rms_norm(ctx: Any, inputs: Any, output: Any) -> None:
    input, gamma, _ = inputs
    rstd = output[1]
    ctx.mark_non_differentiable(rstd)
    ctx.save_for_backward(input, gamma, rstd)


def _backward_rms_norm(ctx: Any, dy: Tensor, _: Any) -> tuple[Tensor, Tensor, None]:
    input, gamma, rstd = ctx.saved_tensors
    dinput, dgamma = torch.ops.npu.npu_rms_norm_backward(dy.to(input.dtype), input, gamma, rstd)
    return dinput, dgamma.to(gamma.dtype), None


def _check_rms_norm_backward(dy: Tensor, input: Tensor, gamma: Tensor, rstd: Tensor) -> None:
    check_rms_norm(input, gamma)
    if dy.shape != input.shape or dy.dtype != input.dtype:
        raise OperatorArgumentError(
            f"npu_rms_norm_backward: dy is {tuple(dy.shape)} {_short(dy.dtype)}, input is "
            f"{tuple(input.shape)} {_short(input.dtype)}; they must agree"
        )
    if rstd.dtype != FP32:
        raise OperatorArgumentError(
            f"npu_rms_norm_backward: rstd is {_short(rstd.dtype)}, it must be float32"
        )


def _measure_nothing(*args: Any, **kwargs: Any) -> dict[str, Any]:
    return {}


def _fake_rms_norm_backward(
    dy: Tensor, input: Tensor, gamma: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor]:
    dinput = torch.empty(input.shape, dtype=input.dtype, device=input.device)
    return dinput, gamma.new_empty(gamma.shape, dtype=FP32)


def _norm_sharding_dims(input: Any, gamma: Any) -> range:
    """Dims that may be split: every row is normalised on its own."""
    return range(len(input.shape) - len(gamma.shape))


def _shard_rms_norm(input: Any, gamma: Any, epsilon: float = 1e-6) -> list[Any]:
    from torch.distributed.tensor import Replicate, Shard

    whole = Replicate()
    rules: list[Any] = [([whole, whole], [whole, whole, None])]
    rules += [
        ([Shard(d), Shard(d)], [Shard(d), whole, None]) for d in _norm_sharding_dims(input, gamma)
    ]
    return rules


def _shard_rms_norm_backward(dy: Any, input: Any, gamma: Any, rstd: Any) -> list[Any]:
    from torch.distributed.tensor import Partial, Replicate, Shard

    whole = Replicate()
    rules: list[Any] = [([whole, whole], [whole] * 4)]
    # each rank sums dgamma over its own rows
    rules += [
        ([Shard(d), Partial()], [Shard(d), Shard(d), whole, Shard(d)])
        for d in _norm_sharding_dims(input, gamma)
    ]
    return rules


RMS_NORM = OperatorKernels(
    reference=reference.rms_norm,
    fake=_fake_rms_norm,
    check=check_rms_norm,
    measure=_measure_rms_norm,
    setup_context=_setup_rms_norm,
    backward=_backward_rms_norm,
    sharding=_shard_rms_norm,
)
RMS_NORM_BACKWARD = OperatorKernels(
    reference=reference.rms_norm_backward,
    fake=_fake_rms_norm_backward,
    check=_check_rms_norm_backward,
    measure=_measure_nothing,
    sharding=_shard_rms_norm_backward,
)


# ---------------------------------------------------------------- rotary


def _table_pattern(table: Tensor, input: Tensor) -> str | None:
    """Name the broadcast of a table over ``[a, b, c, D]``, ignoring D: '1' or 'x' per dim."""
    pattern = ""
    for size, full in zip(table.shape[:-1], input.shape[:-1], strict=True):
        if size == full:
            pattern += "x"
        elif size == 1:
            pattern += "1"
        else:
            return None
    return pattern


def _fits(table: Tensor, input: Tensor, pattern: str) -> bool:
    return all(
        size == (1 if want == "1" else full)
        for size, full, want in zip(table.shape, input.shape, pattern, strict=False)
    )


# broadcast patterns of the tables over the dims before D, for some layout of the input
_PATTERNS_3D = ("x1", "xx")
_PATTERNS_4D = {
    # layouts BNSD, BSND, SBND in this order; 'x' is the full size, '1' is broadcast
    "half": ("11x", "x1x", "xxx", "1x1", "xx1", "x11"),
    "interleave": ("11x", "1x1", "x11"),
}


def check_rotary_mul(
    input: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str = "half", rotate: Tensor | None = None
) -> None:
    """Refuse what no device takes; see ``reference.rotary_mul`` for the arguments.

    Raises:
        OperatorArgumentError: Naming shapes, dtypes or the mode.
    """
    if rotary_mode not in ROTARY_MODES:
        known = ", ".join(repr(m) for m in ROTARY_MODES)
        raise OperatorArgumentError(
            f"npu_rotary_mul: unknown rotary_mode {rotary_mode!r}, known: {known}"
        )
    if input.dtype not in (FP16, BF16, FP32):
        raise OperatorArgumentError(
            f"npu_rotary_mul: input is {_short(input.dtype)}; float16, bfloat16 and float32 are "
            f"supported"
        )
    if input.dim() not in (3, 4):
        raise OperatorArgumentError(
            f"npu_rotary_mul: input {tuple(input.shape)} has {input.dim()} dims, expected 3 (TND) "
            f"or 4"
        )
    if r1.shape != r2.shape or r1.dim() != input.dim() or r1.shape[-1] != input.shape[-1]:
        raise OperatorArgumentError(
            f"npu_rotary_mul: r1 {tuple(r1.shape)} and r2 {tuple(r2.shape)} must be equal, with as "
            f"many dims as input {tuple(input.shape)} and the same last dim"
        )
    for name, table in (("r1", r1), ("r2", r2)):
        if not table.is_floating_point():
            raise OperatorArgumentError(
                f"npu_rotary_mul: {name} is {_short(table.dtype)}; pass cosines and sines as real "
                f"floating-point tensors"
            )
    width = input.shape[-1]
    unit = 4 if rotary_mode == "quarter" else 2
    if width % unit:
        raise OperatorArgumentError(
            f"npu_rotary_mul: last dim is {width}, mode {rotary_mode!r} needs a multiple of {unit}"
        )
    if rotate is not None and tuple(rotate.shape) != (width, width):
        raise OperatorArgumentError(
            f"npu_rotary_mul: rotate is {tuple(rotate.shape)}, expected ({width}, {width})"
        )
    if _table_pattern(r1, input) is None:
        raise OperatorArgumentError(
            f"npu_rotary_mul: r1 {tuple(r1.shape)} does not broadcast over input "
            f"{tuple(input.shape)}"
        )
    _check_pattern(input, r1, rotary_mode)


def _check_pattern(input: Tensor, r1: Tensor, rotary_mode: str) -> None:
    if rotary_mode not in _PATTERNS_4D:
        return  # the family that has the other modes takes every broadcast
    allowed = _PATTERNS_3D if input.dim() == 3 else _PATTERNS_4D[rotary_mode]
    if not any(_fits(r1, input, pattern) for pattern in allowed):
        advice = (
            " Per-sample tables work on [batch * seq, heads, D] input with [batch * seq, 1, D] "
            "tables."
            if rotary_mode == "interleave"
            else ""
        )
        raise OperatorArgumentError(
            f"npu_rotary_mul: mode {rotary_mode!r} takes no r1 {tuple(r1.shape)} for input "
            f"{tuple(input.shape)}.{advice}"
        )


def _measure_rotary(
    input: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str = "half", rotate: Any = None
) -> dict[str, Any]:
    sizes: dict[str, Any] = {"rotary_mode": rotary_mode, "head_dim": input.shape[-1]}
    others = [
        full for size, full in zip(r1.shape[:-1], input.shape[:-1], strict=True) if size != full
    ]
    broadcast = 1
    for full in others:
        broadcast *= full
    if rotary_mode == "interleave":
        sizes["interleave_rows"] = broadcast
    elif rotary_mode == "half":
        # batch and heads cannot be told apart by shape: both are limited alike
        sizes["half_batch"] = max(others, default=1)
        sizes["half_heads"] = max(others, default=1)
    if r1.requires_grad or r2.requires_grad:
        sizes["table_grad_rows"] = broadcast
    return sizes


def _fake_rotary_mul(
    input: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str = "half", rotate: Any = None
) -> Tensor:
    return torch.empty(input.shape, dtype=input.dtype, device=input.device)


def _setup_rotary_mul(ctx: Any, inputs: Any, output: Any) -> None:
    input, r1, r2, rotary_mode, rotate = inputs
    ctx.rotary_mode = rotary_mode
    ctx.has_rotate = rotate is not None
    ctx.save_for_backward(input, r1, r2)


def _backward_rotary_mul(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    input, r1, r2 = ctx.saved_tensors
    if ctx.has_rotate or ctx.rotary_mode == "interleave-half":
        what = "rotate" if ctx.has_rotate else "mode 'interleave-half'"
        raise OperatorArgumentError(f"npu_rotary_mul: backward is not supported with {what}")
    grad = grad.to(input.dtype)
    dinput, _, _ = torch.ops.npu.npu_rotary_mul_backward(grad, input, r1, r2, ctx.rotary_mode)
    if not (ctx.needs_input_grad[1] or ctx.needs_input_grad[2]):
        return dinput, None, None, None, None
    # the raw operator decides by requires_grad of the saved tables, which compiled backward graphs
    # do not carry; these two sums do not depend on it
    wide = reference.compute_dtype(input.dtype)
    product, rotated = grad.to(wide), reference.rotate(input.to(wide), ctx.rotary_mode)
    dr1 = (product * input).sum_to_size(r1.shape)
    dr2 = (product * rotated).sum_to_size(r2.shape)
    return dinput, dr1.to(r1.dtype), dr2.to(r2.dtype), None, None


def _check_rotary_mul_backward(
    grad: Tensor, input: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str = "half"
) -> None:
    check_rotary_mul(input, r1, r2, rotary_mode)
    if rotary_mode == "interleave-half":
        raise OperatorArgumentError("npu_rotary_mul_backward: no backward for 'interleave-half'")
    if grad.shape != input.shape or grad.dtype != input.dtype:
        raise OperatorArgumentError(
            f"npu_rotary_mul_backward: grad is {tuple(grad.shape)} {_short(grad.dtype)}, input is "
            f"{tuple(input.shape)} {_short(input.dtype)}; they must agree"
        )


def _measure_rotary_backward(
    grad: Tensor, input: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str = "half"
) -> dict[str, Any]:
    return _measure_rotary(input, r1, r2, rotary_mode)


def _fake_rotary_mul_backward(
    grad: Tensor, input: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str = "half"
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        torch.empty(input.shape, dtype=input.dtype, device=input.device),
        torch.empty(r1.shape, dtype=input.dtype, device=input.device),
        torch.empty(r2.shape, dtype=input.dtype, device=input.device),
    )


def _rotary_dims(input: Any, r1: Any) -> list[tuple[int, bool]]:
    """Dims that may be split, each with whether the tables have that dim in full."""
    return [(d, r1.shape[d] == input.shape[d] > 1) for d in range(len(input.shape) - 1)]


def _shard_rotary_mul(
    input: Any, r1: Any, r2: Any, rotary_mode: str = "half", rotate: Any = None
) -> list[Any]:
    from torch.distributed.tensor import Replicate, Shard

    whole = Replicate()
    extra = [None] if rotate is None else [whole]
    rules: list[Any] = [([whole], [whole, whole, whole, None, *extra])]
    for d, in_tables in _rotary_dims(input, r1):
        table = Shard(d) if in_tables else whole
        rules.append(([Shard(d)], [Shard(d), table, table, None, *extra]))
    return rules


def _shard_rotary_mul_backward(
    grad: Any, input: Any, r1: Any, r2: Any, rotary_mode: str = "half"
) -> list[Any]:
    from torch.distributed.tensor import Partial, Replicate, Shard

    whole = Replicate()
    rules: list[Any] = [([whole] * 3, [whole] * 4 + [None])]
    for d, in_tables in _rotary_dims(input, r1):
        table = Shard(d) if in_tables else whole
        # over a dim the tables broadcast, each rank sums its own part of their gradient
        grads = Shard(d) if in_tables else Partial()
        rules.append(([Shard(d), grads, grads], [Shard(d), Shard(d), table, table, None]))
    return rules


ROTARY_MUL = OperatorKernels(
    reference=reference.rotary_mul,
    fake=_fake_rotary_mul,
    check=check_rotary_mul,
    measure=_measure_rotary,
    setup_context=_setup_rotary_mul,
    backward=_backward_rotary_mul,
    sharding=_shard_rotary_mul,
)
ROTARY_MUL_BACKWARD = OperatorKernels(
    reference=reference.rotary_mul_backward,
    fake=_fake_rotary_mul_backward,
    check=_check_rotary_mul_backward,
    measure=_measure_rotary_backward,
    sharding=_shard_rotary_mul_backward,
)
