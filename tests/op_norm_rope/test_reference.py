"""Reference kernels: properties, blocks, known numbers, modes without a gradient."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.op_norm_rope import golden
from torchtitan_npu_op_norm_rope import reference


@settings(max_examples=30, deadline=None)
@given(
    rows=st.integers(0, 4),
    width=st.integers(1, 9),
    scale=st.sampled_from([0.0, 1e-20, 1e-3, 1.0, 1e18]),
    seed=st.integers(0, 100),
)
def test_rms_norm_property_float32(rows, width, scale, seed):
    generator = torch.Generator(torch.get_default_device()).manual_seed(seed)
    x = torch.randn(rows, width, generator=generator) * scale
    gamma = torch.randn(width, generator=generator)
    y, rstd = reference.rms_norm(x, gamma, 1e-6)
    want, want_rstd = golden.rms_norm(x, gamma, 1e-6)
    torch.testing.assert_close(y.double(), want, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(rstd.double(), want_rstd, rtol=1e-5, atol=0)


def test_many_blocks_give_what_one_block_gives(monkeypatch):
    torch.manual_seed(0)
    x, gamma, dy = torch.randn(37, 8), torch.randn(8), torch.randn(37, 8)
    whole = reference.rms_norm(x, gamma)
    grads = reference.rms_norm_backward(dy, x, gamma, whole[1])
    monkeypatch.setattr(reference, "_BLOCK_ELEMENTS", 40)
    blocks = reference.rms_norm(x, gamma)
    assert torch.equal(blocks[0], whole[0])
    assert torch.equal(blocks[1], whole[1])
    for a, b in zip(reference.rms_norm_backward(dy, x, gamma, blocks[1]), grads, strict=True):
        torch.testing.assert_close(a, b)


# ---------------------------------------------------------------- rotary


@settings(max_examples=30, deadline=None)
@given(
    batch=st.integers(1, 3),
    length=st.integers(1, 6),
    heads=st.integers(1, 4),
    half=st.integers(1, 5),
    mode=st.sampled_from(["half", "interleave"]),
    seed=st.integers(0, 100),
)
def test_rotary_property_keeps_the_norm_of_every_pair(batch, length, heads, half, mode, seed):
    generator = torch.Generator(torch.get_default_device()).manual_seed(seed)
    x = torch.randn(batch, length, heads, 2 * half, generator=generator, dtype=torch.float64)
    angle = torch.randn(1, length, 1, half, generator=generator, dtype=torch.float64)
    wide = angle.repeat_interleave(2, -1) if mode == "interleave" else torch.cat((angle, angle), -1)
    y = reference.rotary_mul(x, wide.cos(), wide.sin(), mode)
    for a, b in golden.pairs(mode, 2 * half):
        torch.testing.assert_close(x[..., a] ** 2 + x[..., b] ** 2, y[..., a] ** 2 + y[..., b] ** 2)
    # turning back gives the input
    back = reference.rotary_mul(y, wide.cos(), -wide.sin(), mode)
    torch.testing.assert_close(back, x)


@pytest.mark.parametrize(
    ("mode", "want"),
    [
        ("half", [-1.9841, 1.9599, 2.4624, 4.0198]),
        ("interleave", [-1.1426, 1.9221, 2.9599, 4.0298]),
    ],
)
def test_known_numbers(mode, want):
    angle = torch.tensor([1.0, 0.01])
    wide = angle.repeat_interleave(2) if mode == "interleave" else angle.repeat(2)
    x = torch.tensor([1.0, 2, 3, 4]).view(1, 1, 1, 4)
    cos, sin = wide.cos().view_as(x), wide.sin().view_as(x)
    got = torch.ops.npu.npu_rotary_mul(x, cos, sin, mode)
    torch.testing.assert_close(got.flatten(), torch.tensor(want), atol=1e-4, rtol=0)


def test_rotate_matrix_equals_the_mode():
    torch.manual_seed(0)
    x, cos, sin = torch.randn(2, 5, 3, 8), torch.randn(1, 5, 1, 8), torch.randn(1, 5, 1, 8)
    matrix = torch.zeros(8, 8)
    for a, b in golden.pairs("half", 8):
        matrix[b, a], matrix[a, b] = -1, 1
    torch.testing.assert_close(
        reference.rotary_mul(x, cos, sin, "half", matrix), reference.rotary_mul(x, cos, sin, "half")
    )
    matrix.zero_()
    for a, b in golden.pairs("interleave", 8):
        matrix[b, a], matrix[a, b] = -1, 1
    torch.testing.assert_close(
        reference.rotary_mul(x, cos, sin, "half", matrix),
        reference.rotary_mul(x, cos, sin, "interleave"),
    )


def test_interleave_half_deinterleaves_first():
    torch.manual_seed(0)
    x, cos, sin = torch.randn(1, 3, 2, 8), torch.randn(1, 3, 1, 8), torch.randn(1, 3, 1, 8)
    apart = torch.cat((x[..., 0::2], x[..., 1::2]), -1)
    torch.testing.assert_close(
        reference.rotary_mul(x, cos, sin, "interleave-half"),
        reference.rotary_mul(apart, cos, sin, "half"),
    )
