"""Plain PyTorch kernels of the norm and rotary operators, on any device. They define correct.

Shape letters in this file:
    R rows (all leading dims flattened), D normalised or rotated width

Kernels work through the rows in blocks that fit a processor cache: on a CPU that is several times
faster than whole-tensor expressions, and it bounds the float32 copies they need.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

_BLOCK_ELEMENTS = 1 << 18


def _row_blocks(num_rows: int, width: int) -> Iterator[slice]:
    step = max(1, _BLOCK_ELEMENTS // max(1, width))
    for start in range(0, num_rows, step):
        yield slice(start, min(start + step, num_rows))


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Type that sums and products are formed in: float64 for float64 input, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def rms_norm(input: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    """Normalise by the root mean square over the trailing dims, scale, round once.

    rstd = 1 / sqrt(mean(input^2) + epsilon);  y = input * rstd * gamma

    Args:
        input: ``[..., *gamma.shape]``, floating point.
        gamma: Scale, any number of trailing dims of ``input``.
        epsilon: Added to the mean square, inside the root.

    Returns:
        ``y`` with shape and dtype of ``input``, and ``rstd``, float32 (float64 for float64 input),
        leading dims of ``input`` followed by a 1 for every normalised dim.

    Source:
        op-plugin docs: torch_npu-npu_rms_norm; formula of torch.nn.RMSNorm.
    """
    dtype = compute_dtype(input.dtype)
    width = gamma.numel()
    lead = input.shape[: input.dim() - gamma.dim()]
    num_rows = math.prod(lead)
    input_RD = input.reshape(num_rows, width)
    gamma_D = gamma.reshape(width).to(dtype)
    y_RD = torch.empty((num_rows, width), dtype=input.dtype, device=input.device)
    rstd_R1 = torch.empty((num_rows, 1), dtype=dtype, device=input.device)
    for rows in _row_blocks(num_rows, width):
        x = input_RD[rows].to(dtype)
        rstd = x.square().mean(-1, keepdim=True).add_(epsilon).rsqrt_()
        rstd_R1[rows] = rstd
        y_RD[rows] = (x * rstd).mul_(gamma_D)
    return y_RD.view(input.shape), rstd_R1.view(*lead, *[1] * gamma.dim())


def rms_norm_backward(
    dy: Tensor, input: Tensor, gamma: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of ``rms_norm`` with respect to input and gamma, from the saved ``rstd``.

    With n = input * rstd and g = dy * gamma:
    dinput = rstd * (g - n * mean(g * n));  dgamma = sum over rows of dy * n

    Args:
        dy: Gradient of ``y``, ``[..., *gamma.shape]``.
        input: As given to the forward.
        gamma: As given to the forward.
        rstd: As returned by the forward.

    Returns:
        ``dinput`` in the dtype of ``input``; ``dgamma`` in float32 whatever the dtype of ``gamma``
        (float64 for float64 input).

    Source:
        op-plugin docs: torch_npu-npu_rms_norm; CANN ops-nn: aclnnRmsNormGrad.
    """
    dtype = compute_dtype(input.dtype)
    width = gamma.numel()
    num_rows = math.prod(input.shape[: input.dim() - gamma.dim()])
    dy_RD = dy.reshape(num_rows, width)
    input_RD = input.reshape(num_rows, width)
    rstd_R1 = rstd.reshape(num_rows, 1)
    gamma_D = gamma.reshape(width).to(dtype)
    dinput_RD = torch.empty((num_rows, width), dtype=input.dtype, device=input.device)
    dgamma_D = torch.zeros(width, dtype=dtype, device=input.device)
    for rows in _row_blocks(num_rows, width):
        normed = input_RD[rows].to(dtype) * rstd_R1[rows]
        grad = dy_RD[rows].to(dtype)
        dgamma_D += (grad * normed).sum(0)
        grad = grad * gamma_D
        along = (grad * normed).mean(-1, keepdim=True)
        dinput_RD[rows] = grad.addcmul_(normed, along, value=-1).mul_(rstd_R1[rows])
    return dinput_RD.view(input.shape), dgamma_D.view(gamma.shape)


# Each mode as (parts of x that feed rot(x), sign): rot(x)[target] = sign * x[source], as slices of
# the last dim. rot transposed swaps target and source.
def _rotation(mode: str, width: int) -> list[tuple[slice, slice, float]]:
    if mode == "half":
        low, high = slice(0, width // 2), slice(width // 2, width)
        return [(low, high, -1.0), (high, low, 1.0)]
    if mode == "interleave":
        even, odd = slice(0, width, 2), slice(1, width, 2)
        return [(even, odd, -1.0), (odd, even, 1.0)]
    if mode == "quarter":
        q = width // 4
        parts = [slice(i * q, (i + 1) * q) for i in range(4)]
        return [
            (parts[0], parts[1], -1.0),
            (parts[1], parts[0], 1.0),
            (parts[2], parts[3], -1.0),
            (parts[3], parts[2], 1.0),
        ]
    raise ValueError(f"unknown rotary mode {mode!r}")


def rotate(x: Tensor, rotary_mode: str) -> Tensor:
    """Return rot(x) of ``rotary_mul`` over the whole tensor.

    Args:
        x: ``[..., D]``.
        rotary_mode: ``half``, ``interleave`` or ``quarter``.

    Source:
        op-plugin docs: torch_npu-npu_rotary_mul.
    """
    rotated = torch.empty_like(x)
    for target, source, sign in _rotation(rotary_mode, x.shape[-1]):
        rotated[..., target] = x[..., source] * sign
    return rotated


def _leading_blocks(shape: torch.Size) -> Iterator[tuple[slice, ...]]:
    """Cut a tensor along its first two dims into blocks of a bounded number of elements."""
    first, second = shape[0], shape[1]
    inner = math.prod(shape[2:])
    for i in range(first):
        for rows in _row_blocks(second, inner):
            yield (slice(i, i + 1), rows)


def _block_of(table: Tensor, block: tuple[slice, ...]) -> Tensor:
    """The part of a broadcast table that belongs to a block of the input."""
    index = (b if size > 1 else slice(None) for b, size in zip(block, table.shape, strict=False))
    return table[tuple(index)]


def _deinterleaved(x: Tensor) -> Tensor:
    return torch.cat((x[..., 0::2], x[..., 1::2]), dim=-1)


def _complex_factor(cos: Tensor, sin: Tensor, rotary_mode: str) -> Tensor | None:
    """Tables as one complex factor per pair of neighbours, where both of a pair turn alike.

    A complex product reads and writes each element once, which strided pairs do not.
    """
    if rotary_mode != "interleave" or cos.dtype not in (torch.float32, torch.float64):
        return None
    if not (
        torch.equal(cos[..., 0::2], cos[..., 1::2]) and torch.equal(sin[..., 0::2], sin[..., 1::2])
    ):
        return None
    return torch.complex(cos[..., 0::2].contiguous(), sin[..., 0::2].contiguous())


def _as_complex(x: Tensor) -> Tensor:
    """Pairs of neighbours as complex numbers, without a copy where the layout allows it."""
    aligned = x.stride(-1) == 1 and not any(n % 2 for n in (*x.stride()[:-1], x.storage_offset()))
    return torch.view_as_complex((x if aligned else x.contiguous()).unflatten(-1, (-1, 2)))


def _times(x: Tensor, factor: Tensor) -> Tensor:
    """``x``, pairs of neighbours taken as complex numbers, times a factor."""
    dtype = factor.real.dtype
    if x.dtype == dtype:
        # nothing to cast, so nothing that blocks would keep small
        return torch.view_as_real(_as_complex(x) * factor).flatten(-2).contiguous()
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    for block in _leading_blocks(x.shape):
        product = _as_complex(x[block].to(dtype)) * _block_of(factor, block)
        out[block] = torch.view_as_real(product).flatten(-2)
    return out


def rotary_mul(
    input: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str = "half", rotate: Tensor | None = None
) -> Tensor:
    """Rotate pairs of the last dim: ``input * r1 + rot(input) * r2``.

    rot(x) by mode: ``half`` [-x_high, x_low]; ``interleave`` (x0, x1) -> (-x1, x0) for each pair of
    neighbours; ``quarter`` half on each half; ``interleave-half`` brings even elements to the front
    and odd ones to the back, then rotates as ``half``. With ``rotate``, rot(x) = x @ rotate.

    Args:
        input: ``[T, N, D]`` or a 4-D layout ending in D, floating point.
        r1: Cosines, broadcast against ``input``, full width D. Cast to the dtype of ``input``.
        r2: Sines, shape of ``r1``.
        rotary_mode: See above.
        rotate: Optional ``[D, D]`` matrix that replaces the mode's rotation.

    Returns:
        Shape and dtype of ``input``. Products and the sum are formed in float32 (float64 for
        float64 input) and rounded once.

    Source:
        op-plugin docs: torch_npu-npu_rotary_mul.
    """
    dtype = compute_dtype(input.dtype)
    cos, sin = (r.to(input.dtype).to(dtype) for r in (r1, r2))
    factor = None if rotate is not None else _complex_factor(cos, sin, rotary_mode)
    if factor is not None:
        return _times(input, factor)
    out = torch.empty(input.shape, dtype=input.dtype, device=input.device)
    for block in _leading_blocks(input.shape):
        x = input[block].to(dtype)
        if rotary_mode == "interleave-half":
            x = _deinterleaved(x)
        c, s = _block_of(cos, block), _block_of(sin, block)
        y = x * c
        if rotate is not None:
            y.addcmul_(x @ rotate.to(dtype), s.expand_as(y))
        else:
            mode = "half" if rotary_mode == "interleave-half" else rotary_mode
            for target, source, sign in _rotation(mode, x.shape[-1]):
                y[..., target].addcmul_(x[..., source], s[..., target], value=sign)
        out[block] = y
    return out


def rotary_mul_backward(
    grad: Tensor,
    input: Tensor,
    r1: Tensor,
    r2: Tensor,
    rotary_mode: str = "half",
    tables_need_grad: bool | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of ``rotary_mul`` with respect to input, r1 and r2.

    dinput = r1 * grad + rot_transposed(r2 * grad);  dr1 = sum of grad * input over broadcast dims;
    dr2 = sum of grad * rot(input) over broadcast dims

    Args:
        grad: Gradient of the output, shape of ``input``.
        input: As given to the forward.
        r1: As given to the forward.
        r2: As given to the forward.
        rotary_mode: ``half``, ``interleave`` or ``quarter``.
        tables_need_grad: Whether to compute dr1 and dr2; by default, if r1 or r2 requires grad.

    Returns:
        Three tensors in the dtype of ``input``, shapes of input, r1 and r2. The device leaves dr1
        and dr2 unwritten when neither table requires grad; here they are then NaN, so that using
        them shows.

    Source:
        op-plugin docs: torch_npu-npu_rotary_mul; op-plugin tests: test_npu_rotary_mul_backward.
    """
    dtype = compute_dtype(input.dtype)
    if tables_need_grad is None:
        tables_need_grad = r1.requires_grad or r2.requires_grad
    cos, sin = (r.to(input.dtype).to(dtype) for r in (r1, r2))
    parts = _rotation(rotary_mode, input.shape[-1])
    factor = _complex_factor(cos, sin, rotary_mode)
    if factor is None:
        dinput = torch.empty(input.shape, dtype=input.dtype, device=input.device)
    else:
        dinput = _times(grad, factor.conj().resolve_conj())
    if tables_need_grad:
        dr1 = torch.zeros(r1.shape, dtype=dtype, device=input.device)
        dr2 = torch.zeros_like(dr1)
    else:
        dr1 = torch.full(r1.shape, math.nan, dtype=dtype, device=input.device)
        dr2 = dr1.clone()
    if factor is not None and not tables_need_grad:
        return dinput, dr1.to(input.dtype), dr2.to(input.dtype)
    for block in _leading_blocks(input.shape):
        dy = grad[block].to(dtype)
        c, s = _block_of(cos, block), _block_of(sin, block)
        if factor is None:
            dx = dy * c
            for target, source, sign in parts:
                dx[..., source].addcmul_(dy[..., target], s[..., target], value=sign)
            dinput[block] = dx
        if tables_need_grad:
            x = input[block].to(dtype)
            _block_of(dr1, block).add_((dy * x).sum_to_size(c.shape))
            _block_of(dr2, block).add_((dy * rotate(x, rotary_mode)).sum_to_size(s.shape))
    return dinput, dr1.to(input.dtype), dr2.to(input.dtype)
