"""Plain PyTorch kernels of the scaled GELU operators, on any device. They define correct."""

from __future__ import annotations

import math

import torch
from torch import Tensor

_ROOT = math.sqrt(2.0 / math.pi)
_CUBIC = 0.044715


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype the formula is evaluated in: float64 for float64 input, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _gate(x: Tensor) -> Tensor:
    # 0.5 * (1 + tanh(u)) is sigmoid(2 * u), which does not cancel where tanh is close to -1
    return torch.sigmoid(2.0 * _ROOT * (x + _CUBIC * x * x * x))


def scaled_gelu(input: Tensor, scale: float = 1.0) -> Tensor:
    """Apply the tanh form of GELU and multiply by a factor.

    y = scale * 0.5 * x * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x^3)))

    Args:
        input: Any shape, floating point.
        scale: Factor on the result, unitless.

    Returns:
        Contiguous, shape and dtype of ``input``. Evaluated in float32 (float64 for float64 input),
        factor included, and rounded once.

    Source:
        Gaussian Error Linear Units (arXiv 1606.08415), section 2; torch.nn.GELU (torch 2.13.0).
    """
    x = input.to(compute_dtype(input.dtype))
    return (x * _gate(x) * scale).to(input.dtype).contiguous()


def scaled_gelu_backward(grad: Tensor, input: Tensor, scale: float = 1.0) -> Tensor:
    """Gradient of ``scaled_gelu`` with respect to its input.

    With u = sqrt(2 / pi) * (x + 0.044715 * x^3) and g = 0.5 * (1 + tanh(u)):
    dx = grad * scale * (g + 2 * x * g * (1 - g) * du/dx)

    Args:
        grad: Gradient of the output, shape of ``input``, floating point.
        input: As given to the forward.
        scale: As given to the forward.

    Returns:
        Contiguous, shape and dtype of ``input``. Evaluated in float32 (float64 for float64 input)
        and rounded once.

    Source:
        Derivative of ``scaled_gelu``: Gaussian Error Linear Units (arXiv 1606.08415), section 2;
        torch.nn.GELU (torch 2.13.0).
    """
    dtype = compute_dtype(input.dtype)
    x = input.to(dtype)
    gate = _gate(x)
    slope = _ROOT * (1.0 + 3.0 * _CUBIC * x * x)
    derivative = gate + 2.0 * x * gate * (1.0 - gate) * slope
    return (grad.to(dtype) * derivative * scale).to(input.dtype).contiguous()
