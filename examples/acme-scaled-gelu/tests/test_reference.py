"""The reference kernels: the digits of the tail, rounding, strides."""

import math

import pytest
import torch

from acme_torchtitan_npu_gelu import reference


def sample(shape, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return (3.0 * torch.randn(shape, generator=generator, dtype=torch.float64)).to(dtype)


def test_negative_tail_keeps_its_digits():
    # 1 + tanh(u) would cancel here: float32 tanh leaves no more than one digit at -5
    x = torch.tensor([-3.0, -4.0, -5.0, -6.0])
    # the same formula with the sum written as a quotient, so that the loop does not cancel either
    root = math.sqrt(2.0 / math.pi)
    want = torch.tensor(
        [a / (1.0 + math.exp(-2.0 * root * (a + 0.044715 * a**3))) for a in x.tolist()]
    )
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
