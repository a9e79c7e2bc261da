"""The dispatcher operators: what they refuse, device limits, and what no case covers."""

import pytest
import torch

from torchtitan_npu_core import limits
from torchtitan_npu_core.errors import DeviceLimitError, OperatorArgumentError
from torchtitan_npu_core.operators import device_family

npu = torch.ops.npu
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def tensors(*shapes, dtype=FP32, grad=True):
    torch.manual_seed(0)
    return [torch.randn(s, dtype=dtype).requires_grad_(grad) for s in shapes]


@pytest.fixture(params=["default", "meta"])
def place(request):
    """Device of the arguments."""
    if request.param == "default":
        return torch.get_default_device()
    request.getfixturevalue("own_registration")
    return torch.device("meta")


# ---------------------------------------------------------------- rms norm


def test_rms_norm_raw_dgamma_is_float32():
    x, gamma = tensors((3, 8), (8,), dtype=BF16, grad=False)
    rstd = npu.npu_rms_norm(x, gamma)[1]
    dx, dgamma = npu.npu_rms_norm_backward(x, x, gamma, rstd)
    assert (dx.dtype, dgamma.dtype) == (BF16, FP32)


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


@pytest.mark.parametrize("mode", ["half", "interleave"])
def test_opcheck_of_rotary_with_tables_that_want_no_gradient(mode, device):
    (x,) = tensors((2, 3, 2, 8))
    cos, sin = tensors((1, 3, 1, 8), (1, 3, 1, 8), grad=False)
    utils = ["test_schema", "test_faketensor", "test_aot_dispatch_dynamic"]
    if device == "cpu":
        utils.append("test_autograd_registration")  # torch has it for no other device
    torch.library.opcheck(npu.npu_rotary_mul.default, (x, cos, sin, mode), test_utils=utils)


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
