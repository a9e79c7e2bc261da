"""The reference kernels against the formula, written once more as loops over Python floats.

Python floats are float64, and nothing here is shared with the kernels.
"""

import math

import pytest
import torch

from acme_torchtitan_npu_gelu import reference

SHAPES = [(), (1,), (5, 63), (2, 1, 7), (0, 3)]
SCALES = [1.0, 0.0, -1.75]


def gelu(x):
    return 0.5 * x * (1.0 + math.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3)))


def gelu_slope(x):
    u = math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3)
    du = math.sqrt(2.0 / math.pi) * (1.0 + 3.0 * 0.044715 * x**2)
    return 0.5 * (1.0 + math.tanh(u)) + 0.5 * x * du / math.cosh(u) ** 2


def loop(function, *tensors):
    """Apply a function of floats to every element; float64, shape of the first tensor."""
    columns = [t.double().flatten().tolist() for t in tensors]
    values = [function(*row) for row in zip(*columns, strict=True)]
    return torch.tensor(values, dtype=torch.float64).reshape(tensors[0].shape)


def sample(shape, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return (3.0 * torch.randn(shape, generator=generator, dtype=torch.float64)).to(dtype)


def case(shape):
    return "x".join(map(str, shape)) or "scalar"


@pytest.mark.parametrize("shape", SHAPES, ids=case)
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-14), (torch.float32, 2e-6)], ids=["fp64", "fp32"]
)
def test_forward_and_gradient_match_loops(shape, scale, dtype, tolerance):
    x, dy = sample(shape, dtype), sample(shape, dtype, seed=1)
    y = reference.scaled_gelu(x, scale)
    dx = reference.scaled_gelu_backward(dy, x, scale)
    want_y = loop(lambda a: scale * gelu(a), x)
    want_dx = loop(lambda a, d: d * scale * gelu_slope(a), x, dy)
    assert y.dtype == dx.dtype == dtype
    torch.testing.assert_close(y.double(), want_y, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(dx.double(), want_dx, rtol=tolerance, atol=10 * tolerance)


def test_loops_tell_the_tanh_form_from_the_exact_one():
    # the most likely wrong variant: it has to be outside the tolerance used above
    x = sample((5, 63), torch.float64)
    exact = loop(lambda a: 0.5 * a * (1.0 + math.erf(a / math.sqrt(2.0))), x)
    assert (exact - loop(gelu, x)).abs().max() > 1e-4


class ReferenceFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, scale):
        ctx.save_for_backward(x)
        ctx.scale = scale
        return reference.scaled_gelu(x, scale)

    @staticmethod
    def backward(ctx, grad):
        return reference.scaled_gelu_backward(grad, *ctx.saved_tensors, ctx.scale), None


@pytest.mark.parametrize("scale", SCALES)
def test_backward_is_the_derivative_of_the_forward(scale):
    x = sample((4, 9), torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(lambda t: ReferenceFunction.apply(t, scale), (x,))
    assert torch.autograd.gradcheck(lambda t: reference.scaled_gelu(t, scale), (x,))


def test_negative_tail_keeps_its_digits():
    # 1 + tanh(u) would cancel here: float32 tanh leaves no more than one digit at -5
    x = torch.tensor([-3.0, -4.0, -5.0, -6.0])
    # the same formula with the sum written as a quotient, so that the loop does not cancel either
    root = math.sqrt(2.0 / math.pi)
    want = loop(lambda a: a / (1.0 + math.exp(-2.0 * root * (a + 0.044715 * a**3))), x).float()
    torch.testing.assert_close(reference.scaled_gelu(x), want, rtol=1e-5, atol=0.0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_half_inputs_are_rounded_once_after_the_factor(dtype):
    x, scale = sample((5, 63), dtype), 1.1
    y = reference.scaled_gelu(x, scale)
    assert torch.equal(y, reference.scaled_gelu(x.float(), scale).to(dtype))
    # the wrong variant rounds before it multiplies
    assert not torch.equal(y, reference.scaled_gelu(x) * scale)


def test_result_is_contiguous_whatever_the_strides_of_the_input():
    x = sample((4, 6), torch.float32).t()
    assert reference.scaled_gelu(x).is_contiguous()
    assert reference.scaled_gelu_backward(x, x).is_contiguous()
