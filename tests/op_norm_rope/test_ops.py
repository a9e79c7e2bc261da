"""The dispatcher operators: autograd, dtypes, layouts, checks, limits, budgets."""

import functools

import pytest
import torch
import torch.nn.functional as F

from tests.op_norm_rope import golden
from torchtitan_npu_core import limits
from torchtitan_npu_core.errors import (
    DeviceLimitError,
    NotDifferentiableError,
    OperatorArgumentError,
)
from torchtitan_npu_core.operators import device_family
from torchtitan_npu_op_norm_rope import plugin

npu = torch.ops.npu
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def grads(output, inputs, weight):
    return torch.autograd.grad((output.float() * weight).sum(), inputs)


def error(got, truth):
    return (got.double() - truth.double()).norm() / truth.double().norm()


# ---------------------------------------------------------------- schemas and opcheck


@pytest.mark.parametrize("spec", plugin.torchtitan_npu_operators(), ids=lambda s: s.name)
def test_declared_schema_is_the_registered_one(spec):
    base = getattr(npu, spec.name.removeprefix("npu::")).default
    assert base._schema == torch._C.parse_schema(f"npu::{spec.schema}")


def tensors(*shapes, dtype=FP32, grad=True):
    torch.manual_seed(0)
    return [torch.randn(s, dtype=dtype).requires_grad_(grad) for s in shapes]


@pytest.fixture
def opcheck(device):
    """``torch.library.opcheck``, with the tests it has for this device."""
    names = ["test_schema", "test_autograd_registration", "test_faketensor"]
    names += ["test_aot_dispatch_dynamic"]
    if device != "cpu":
        names.remove("test_autograd_registration")
    return functools.partial(torch.library.opcheck, test_utils=names)


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_opcheck_rms_norm(dtype, opcheck):
    x, gamma = tensors((2, 3, 8), (8,), dtype=dtype)
    opcheck(npu.npu_rms_norm.default, (x, gamma, 1e-5), atol=1e-2, rtol=1e-2)
    rstd = npu.npu_rms_norm(x, gamma)[1].detach()
    args = [t.detach() for t in (x, x, gamma)]
    opcheck(npu.npu_rms_norm_backward.default, (*args, rstd))


@pytest.mark.parametrize("mode", ["half", "interleave"])
@pytest.mark.parametrize("table_grad", [False, True])
def test_opcheck_rotary(mode, table_grad, opcheck, device):
    (x,) = tensors((2, 3, 2, 8))
    cos, sin = tensors((1, 3, 1, 8), (1, 3, 1, 8), grad=table_grad)
    if table_grad and device != "cpu":
        # torch_npu decides by the saved tables, which in a compiled graph want no gradient
        opcheck.keywords["test_utils"].remove("test_aot_dispatch_dynamic")
    opcheck(npu.npu_rotary_mul.default, (x, cos, sin, mode))
    # its unasked-for outputs are NaN by design: compare a call that asks for them
    args = (x.detach(), x.detach(), cos.detach().requires_grad_(), sin.detach(), mode)
    torch.library.opcheck(
        npu.npu_rotary_mul_backward.default, args, test_utils=("test_schema", "test_faketensor")
    )


@pytest.fixture(params=["default", "meta"])
def place(request):
    """Device of the arguments."""
    if request.param == "default":
        return torch.get_default_device()
    request.getfixturevalue("own_registration")
    return torch.device("meta")


# ---------------------------------------------------------------- rms norm


@pytest.mark.parametrize(
    ("input_dtype", "gamma_dtype"),
    [(FP32, FP32), (BF16, BF16), (BF16, FP32), (FP16, FP16), (FP16, FP32)],
)
@pytest.mark.parametrize("shape", [(2, 63, 48), (1, 1, 7), (5, 130)], ids=str)
@pytest.mark.filterwarnings("ignore:Mismatch dtype")
def test_rms_norm_is_as_exact_as_stock(input_dtype, gamma_dtype, shape):
    torch.manual_seed(0)
    x = torch.randn(shape).to(input_dtype).requires_grad_()
    gamma = torch.randn(shape[-1]).to(gamma_dtype).requires_grad_()
    weight = torch.randn(shape)
    want = golden.rms_norm(x.detach(), gamma.detach(), 1e-5)[0]
    want_grads = golden.rms_norm_grads(weight, x.detach(), gamma.detach(), 1e-5)
    y = npu.npu_rms_norm(x, gamma, 1e-5)[0]
    stock = F.rms_norm(x, shape[-1:], gamma, 1e-5)
    assert y.dtype == stock.dtype == input_dtype
    got, stock_grads = grads(y, (x, gamma), weight), grads(stock, (x, gamma), weight)
    floor = torch.finfo(input_dtype).eps
    assert error(y.detach(), want) <= 2 * error(stock.detach(), want) + floor / 100
    for a, b, truth, name in zip(got, stock_grads, want_grads, ("x", "gamma"), strict=True):
        assert a.dtype == b.dtype
        limit = 2 * error(b, truth) + floor / 100
        assert error(a, truth) <= limit, (name, error(a, truth), error(b, truth))


def test_rms_norm_rstd_is_not_differentiable_and_has_trailing_ones():
    x, gamma = tensors((2, 3, 4, 8), (4, 8))
    y, rstd = npu.npu_rms_norm(x, gamma)
    assert rstd.shape == (2, 3, 1, 1)
    assert rstd.dtype == FP32
    assert y.requires_grad
    assert not rstd.requires_grad


def test_rms_norm_of_a_zero_row_is_zero_with_finite_gradients():
    x, gamma = tensors((3, 8), (8,))
    x = x.detach().clone()
    x[1] = 0
    x.requires_grad_()
    y = npu.npu_rms_norm(x, gamma, 1e-6)[0]
    assert torch.equal(y[1], torch.zeros(8))
    y.sum().backward()
    assert torch.isfinite(x.grad).all()
    assert torch.isfinite(gamma.grad).all()


def test_rms_norm_of_a_split_view_and_of_nothing():
    x = torch.randn(2, 5, 12)
    view = x[..., :8]
    assert not view.is_contiguous()
    gamma = torch.randn(8)
    torch.testing.assert_close(
        npu.npu_rms_norm(view, gamma)[0], F.rms_norm(view, (8,), gamma, 1e-6)
    )
    empty = torch.empty(0, 8, requires_grad=True)
    y = npu.npu_rms_norm(empty, gamma)[0]
    y.sum().backward()
    assert y.shape == empty.grad.shape == (0, 8)


def test_rms_norm_raw_dgamma_is_float32():
    x, gamma = tensors((3, 8), (8,), dtype=BF16, grad=False)
    rstd = npu.npu_rms_norm(x, gamma)[1]
    dx, dgamma = npu.npu_rms_norm_backward(x, x, gamma, rstd)
    assert (dx.dtype, dgamma.dtype) == (BF16, FP32)


def test_rms_norm_frozen_gamma_gets_no_gradient():
    x, gamma = tensors((3, 8), (8,))
    gamma.requires_grad_(False)
    npu.npu_rms_norm(x, gamma)[0].sum().backward()
    assert gamma.grad is None
    assert x.grad is not None


@pytest.mark.parametrize(
    ("x", "gamma", "says"),
    [
        (torch.ones(2, 8), torch.ones(4), "trailing dims"),
        (torch.ones(8), torch.ones(2, 8), "as many as input"),
        (torch.ones(2, 8), torch.ones(()), "at least one"),
        (torch.ones(2, 8), torch.ones(8, dtype=BF16), "Cast one of them"),
        (torch.ones(2, 8, dtype=FP16), torch.ones(8, dtype=BF16), "float16 with gamma bfloat16"),
        (torch.ones(2, 8).double(), torch.ones(8).double(), "float64"),
        (torch.ones(2, 8).int(), torch.ones(8).int(), "int32"),
    ],
)
def test_rms_norm_refuses_what_the_device_refuses(place, x, gamma, says):
    with pytest.raises(OperatorArgumentError, match=says):
        npu.npu_rms_norm(x.to(place), gamma.to(place))


# ---------------------------------------------------------------- rotary


@pytest.mark.parametrize("mode", ["half", "interleave"])
@pytest.mark.parametrize("dtype", [FP32, BF16, FP16])
@pytest.mark.parametrize(
    ("shape", "table"),
    [((2, 63, 4, 64), (1, 63, 1, 64)), ((1, 1, 1, 2), (1, 1, 1, 2)), ((9, 3, 6), (9, 1, 6))],
    ids=["B2-S63-N4-D64", "single", "T9-N3-D6"],
)
def test_rotary_is_as_exact_as_plain_torch(mode, dtype, shape, table):
    torch.manual_seed(0)
    x = torch.randn(shape).to(dtype).requires_grad_()
    cos, sin = (torch.randn(table).to(dtype).requires_grad_() for _ in range(2))
    weight = torch.randn(shape)
    rot = x.new_zeros(shape)
    for a, b in golden.pairs(mode, shape[-1]):
        rot = rot.index_copy(-1, torch.tensor([a]), -x[..., b : b + 1])
        rot = rot.index_copy(-1, torch.tensor([b]), x[..., a : a + 1])
    stock = x * cos + rot * sin
    y = npu.npu_rotary_mul(x, cos, sin, mode)
    inputs = (x, cos, sin)
    truth = golden.rotary(*(t.detach() for t in inputs), mode)
    truths = golden.rotary_grads(weight, *(t.detach() for t in inputs), mode)
    floor = torch.finfo(dtype).eps / 100
    assert error(y.detach(), truth) <= 2 * error(stock.detach(), truth) + floor
    for a, b, t in zip(grads(y, inputs, weight), grads(stock, inputs, weight), truths, strict=True):
        assert a.dtype == dtype
        assert error(a, t) <= 2 * error(b, t) + floor


def test_rotary_casts_tables_to_the_input_dtype_first():
    # float32 tables lose precision with a half input, as on the device
    x = torch.full((1, 1, 1, 2), 256.0, dtype=BF16)
    cos = torch.full((1, 1, 1, 2), 1 + 2**-10)
    got = npu.npu_rotary_mul(x, cos, torch.zeros_like(cos))
    assert torch.equal(got, x)


def test_rotary_gradient_reaches_tables_of_another_dtype():
    (x,) = tensors((1, 3, 2, 4), dtype=BF16)
    cos, sin = tensors((1, 3, 1, 4), (1, 3, 1, 4))
    npu.npu_rotary_mul(x, cos, sin).float().sum().backward()
    assert cos.grad.dtype == FP32
    assert torch.isfinite(cos.grad).all()


@pytest.mark.parametrize(
    ("shape", "table", "mode", "says"),
    [
        ((2, 5, 3, 8), (1, 5, 1, 8), "sideways", "unknown rotary_mode"),
        ((2, 5, 3, 7), (1, 5, 1, 7), "half", "multiple of 2"),
        ((2, 5, 3, 6), (1, 5, 1, 6), "quarter", "multiple of 4"),
        ((2, 5, 3, 8), (1, 5, 1, 4), "half", "same last dim"),
        ((2, 5, 3, 8), (5, 8), "half", "as many dims"),
        ((5, 8), (5, 8), "half", "expected 3"),
        ((2, 5, 3, 8), (1, 4, 1, 8), "half", "does not broadcast"),
        ((2, 5, 3, 8), (2, 5, 1, 8), "interleave", "Per-sample tables work on"),
        ((2, 5, 3, 8), (1, 1, 1, 8), "half", "takes no r1"),
    ],
)
def test_rotary_refuses_what_no_device_takes(place, shape, table, mode, says):
    x, t = torch.ones(shape, device=place), torch.ones(table, device=place)
    with pytest.raises(OperatorArgumentError, match=says):
        npu.npu_rotary_mul(x, t, t, mode)


def test_rotary_refuses_complex_tables():
    x = torch.ones(1, 3, 2, 4)
    table = torch.ones(1, 3, 1, 4, dtype=torch.complex64)
    with pytest.raises(OperatorArgumentError, match="real floating-point"):
        npu.npu_rotary_mul(x, table, table)


def test_rotary_backward_with_a_matrix_is_refused_not_wrong(own_registration):
    (x,) = tensors((1, 3, 2, 4))
    table = torch.ones(1, 3, 1, 4)
    y = npu.npu_rotary_mul(x, table, table, "half", torch.eye(4))
    with pytest.raises(OperatorArgumentError, match="not supported with rotate"):
        y.sum().backward()


@pytest.mark.parametrize("name", ["rms", "rotary"])
def test_raw_backward_operators_lose_no_gradient_in_silence(name, own_registration):
    x, gamma = tensors((1, 3, 2, 4), (4,))
    if name == "rms":
        out = npu.npu_rms_norm_backward(x, x, gamma, torch.ones(1, 3, 2, 1))[0]
    else:
        out = npu.npu_rotary_mul_backward(x, x, gamma.expand(1, 3, 1, 4), gamma.expand(1, 3, 1, 4))[
            0
        ]
    with pytest.raises(NotDifferentiableError):
        out.sum().backward()


# ---------------------------------------------------------------- device limits


@pytest.mark.parametrize(
    ("family", "shape", "mode", "says"),
    [
        ("a2", (1, 2, 1, 896), "half", "head_dim is 896"),
        ("a3", (40, 1, 25, 4), "interleave", "interleave_rows is 1000"),
        ("a2", (1000, 2, 1, 4), "half", "half_batch is 1000"),
        ("a3", (1, 2, 1, 8), "quarter", "rotary_mode is quarter"),
        ("950", (1, 2, 1, 1026), "half", "head_dim is 1026"),
    ],
)
def test_limits_of_the_targeted_family_are_enforced(family, shape, mode, says):
    table = torch.ones(1, shape[1], 1, shape[-1])
    with limits.targeting(family), pytest.raises(DeviceLimitError, match=says):
        npu.npu_rotary_mul(torch.ones(shape), table, table, mode)


@pytest.mark.skipif(device_family() not in ("", "950"), reason="the device is another")
def test_quarter_is_fine_on_950():
    table = torch.ones(1, 2, 1, 8)
    with limits.targeting("950"):
        npu.npu_rotary_mul(torch.ones(1, 2, 1, 8), table, table, "quarter")
