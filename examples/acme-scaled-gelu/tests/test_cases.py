"""What the two operators have to do, and mistakes that have to be noticed: the kit does the rest.

The formulas are loops over Python floats, which are float64; nothing is shared with the kernels.
"""

import math

import pytest
import torch
from torchtitan_npu_core.testing import Call, Mutation, OperatorCase, operator_checks

from acme_torchtitan_npu_gelu import reference

HALF = (torch.bfloat16, torch.float16)
ROOT = math.sqrt(2.0 / math.pi)


def gelu(x):
    return 0.5 * x * (1.0 + math.tanh(ROOT * (x + 0.044715 * x**3)))


def gelu_slope(x):
    u = ROOT * (x + 0.044715 * x**3)
    du = ROOT * (1.0 + 3.0 * 0.044715 * x**2)
    return 0.5 * (1.0 + math.tanh(u)) + 0.5 * x * du / math.cosh(u) ** 2


def loop(function, *tensors):
    """Apply a function of floats to every element; float64, shape of the first tensor."""
    columns = [t.double().flatten().tolist() for t in tensors]
    values = [function(*row) for row in zip(*columns, strict=True)]
    return torch.tensor(values, dtype=torch.float64).reshape(tensors[0].shape)


def formula(x, scale=1.0):
    return loop(lambda a: scale * gelu(a), x)


def gradient_formula(grad, x, scale=1.0):
    return loop(lambda d, a: d * scale * gelu_slope(a), grad, x)


# ---------------------------------------------------------------- calls


def inputs(count, view=lambda x: x, shape=(5, 13), **kwargs):
    def make(dtype):
        return Call(*(view((3 * torch.randn(shape)).to(dtype)) for _ in range(count)), **kwargs)

    return make


def grid(count):
    return {
        "plain": inputs(count),
        "scalar": inputs(count, shape=()),
        "empty": inputs(count, shape=(0, 3)),
        "scaled": inputs(count, scale=-1.75),
        "no-scale": inputs(count, scale=0.0),
        "transposed": inputs(count, view=torch.t, scale=1.1),
        "split-view": inputs(count, view=lambda x: x[:, 3:8]),
    }


# ---------------------------------------------------------------- mistakes


def wrong(name, caught_by, function, field="reference"):
    return Mutation(name=name, caught_by=caught_by, kernels={field: function})


def exact_form(input, scale=1.0):
    x = input.to(reference.compute_dtype(input.dtype))
    return (scale * torch.nn.functional.gelu(x)).to(input.dtype).contiguous()


def scaled_after_rounding(input, scale=1.0):
    return reference.scaled_gelu(input) * scale


def strides_of_the_input(input, scale=1.0):
    return torch.empty_like(input).copy_(reference.scaled_gelu(input, scale))


def without_factor(grad, input, scale=1.0):
    return reference.scaled_gelu_backward(grad, input)


CASES = [
    OperatorCase(
        operator="acme::scaled_gelu",
        inputs=grid(1),
        dtypes=(torch.float32, *HALF),
        formula=formula,
        gradients=lambda begin, x, scale=1.0: [gradient_formula(begin[0], x, scale)],
        stock=lambda x, scale=1.0: scale * torch.nn.functional.gelu(x, approximate="tanh"),
        mutations=[
            wrong("exact-form", "formula", exact_form),
            wrong("scaled-after-rounding", "precision", scaled_after_rounding),
            wrong("strides-of-the-input", "fake", strides_of_the_input),
            wrong("forgets-the-scale", "gradients", lambda ctx, g: (g, None), "backward"),
        ],
    ),
    OperatorCase(
        operator="acme::scaled_gelu_backward",
        inputs=grid(2),
        dtypes=(torch.float32, *HALF),
        formula=gradient_formula,
        derivative="B",
        mutations=[
            wrong("without-factor", "formula", without_factor),
            wrong("lost-second-derivative", "gradients", lambda ctx, g: (g, g, None), "backward"),
        ],
    ),
]


@pytest.mark.parametrize("check", operator_checks(CASES))
def test_operator(check):
    check()
