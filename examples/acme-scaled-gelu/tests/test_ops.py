"""The operators as PyTorch sees them: checks, autograd, fake tensors, sharding, device limits."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torchtitan_npu_core.errors import (
    DeviceLimitError,
    NotDifferentiableError,
    OperatorArgumentError,
)
from torchtitan_npu_core.limits import targeting
from torchtitan_npu_core.operators import register_operator

from acme_torchtitan_npu_gelu.plugin import SCALED_GELU, SCALED_GELU_BACKWARD


@pytest.fixture(scope="module", autouse=True)
def operators():
    for spec in (SCALED_GELU, SCALED_GELU_BACKWARD):
        register_operator(spec)


def sample(*shape, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return (3.0 * torch.randn(shape, generator=generator)).to(dtype)


def run(function, x, dy):
    """Output and input gradient."""
    x = x.detach().clone().requires_grad_()
    y = function(x)
    y.backward(dy)
    return y.detach(), x.grad


def test_meta_tensors_get_the_shape_and_dtype():
    y = torch.ops.acme.scaled_gelu(torch.empty(2, 3, dtype=torch.bfloat16, device="meta"))
    assert (y.device.type, y.shape, y.dtype) == ("meta", (2, 3), torch.bfloat16)


def test_second_derivative_raises_instead_of_being_lost():
    x = sample(4).requires_grad_()
    (dx,) = torch.autograd.grad(torch.ops.acme.scaled_gelu(x).sum(), x, create_graph=True)
    with pytest.raises(NotDifferentiableError, match="acme::scaled_gelu_backward"):
        dx.sum().backward()


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.int32, torch.complex64], ids=str)
def test_other_dtypes_are_refused_with_the_known_ones(dtype, device):
    x = torch.ones(2, 3, dtype=dtype, device=device)
    known = r"input \(2, 3\) is .* one of float16, bfloat16, float32"
    with pytest.raises(OperatorArgumentError, match=known):
        torch.ops.acme.scaled_gelu(x)


@pytest.mark.parametrize("scale", [float("inf"), float("nan")])
def test_scale_that_is_not_finite_is_refused(scale):
    with pytest.raises(OperatorArgumentError, match="scale is"):
        torch.ops.acme.scaled_gelu(torch.ones(2), scale)


@pytest.mark.parametrize(
    "grad", [torch.ones(3, 2), torch.ones(2, 3, dtype=torch.bfloat16)], ids=["shape", "dtype"]
)
def test_gradient_that_does_not_fit_the_input_is_refused(grad):
    with pytest.raises(OperatorArgumentError, match="they must agree"):
        torch.ops.acme.scaled_gelu_backward(grad, torch.ones(2, 3))


@pytest.mark.parametrize("family", ["a2", "a3", "950"])
def test_nine_dims_are_an_error_when_the_job_targets_a_device(family):
    x = torch.ones([1] * 9)
    with targeting(family):
        torch.ops.acme.scaled_gelu(x.squeeze(0))
        with pytest.raises(DeviceLimitError, match="input_dims is 9, must be at most 8"):
            torch.ops.acme.scaled_gelu(x)
        with pytest.raises(DeviceLimitError, match="scaled_gelu_backward"):
            torch.ops.acme.scaled_gelu_backward(x, x)


def test_nine_dims_are_a_warning_without_a_target():
    # given once per process and message
    with pytest.warns(UserWarning, match="acme::scaled_gelu would be refused .* a2/a3/950"):
        y = torch.ops.acme.scaled_gelu(torch.ones([1] * 9))
    assert y.dim() == 9


# ---------------------------------------------------------------- DTensor


@pytest.fixture
def mesh():
    # two ranks, of which only this one runs: enough where no rank has to talk to another
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield dist.init_device_mesh("cpu", (2,))
    dist.destroy_process_group()


@pytest.mark.parametrize("placement", [Replicate(), Shard(0), Shard(1)], ids=str)
def test_sharded_tensor_stays_sharded_without_communication(mesh, placement):
    x, dy = sample(4, 6), sample(4, 6, seed=1)
    local_x = DTensor.from_local(x, mesh, [placement], run_check=False).requires_grad_()
    local_dy = DTensor.from_local(dy, mesh, [placement], run_check=False)
    with CommDebugMode() as traffic:
        y = torch.ops.acme.scaled_gelu(local_x, 1.5)
        y.backward(local_dy)
    assert traffic.get_total_counts() == 0
    assert y.placements == local_x.grad.placements == (placement,)
    want_y, want_dx = run(lambda t: torch.ops.acme.scaled_gelu(t, 1.5), x, dy)
    assert torch.equal(y.to_local(), want_y)
    assert torch.equal(local_x.grad.to_local(), want_dx)


def test_unsummed_parts_are_summed_before_the_activation(mesh):
    x = DTensor.from_local(sample(4, 6), mesh, [Partial()], run_check=False)
    with CommDebugMode() as traffic:
        y = torch.ops.acme.scaled_gelu(x)
    assert traffic.get_total_counts() == 1
    assert not y.placements[0].is_partial()
