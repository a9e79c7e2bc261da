"""Replacement modules one by one: norms and their refusals, compile, pickling."""

import pickle

import pytest
import torch
from torch import nn

from torchtitan_npu_core.apply import convert_model
from torchtitan_npu_core.errors import UnmatchedConverterError


def convert(module, plugins, name="npu_rms_norm"):
    box = nn.ModuleDict({"it": module})
    convert_model(box, [name], plugins=plugins)
    return box["it"]


def forward_backward(module, x):
    x = x.detach().clone().requires_grad_()
    y = module(x)
    y.float().square().sum().backward()
    grad = None if module.weight is None else module.weight.grad.clone()
    module.zero_grad()
    return y.detach(), x.grad, grad


@pytest.mark.filterwarnings("ignore:Mismatch dtype")
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("input_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rms", [1.0, 0.1, 0.03])
@pytest.mark.parametrize("eps", [None, 1e-5])
def test_norm_equals_stock_for_every_pair_of_dtypes(input_dtype, weight_dtype, rms, eps, plugins):
    torch.manual_seed(0)
    x = (torch.randn(4, 9, 64) * rms).to(input_dtype)
    stock = nn.RMSNorm(64, eps=eps).to(weight_dtype)
    with torch.no_grad():
        stock.weight.uniform_(0.5, 1.5)
    module = nn.RMSNorm(64, eps=eps).to(weight_dtype)
    module.load_state_dict(stock.state_dict())
    module = convert(module, plugins)
    truth = forward_backward(
        nn.RMSNorm(64, eps=1.1920929e-07 if eps is None else eps).double(), x.double()
    )
    for got, want in zip(forward_backward(module, x), forward_backward(stock, x), strict=True):
        assert got.dtype == want.dtype
        # one rounding of the same float32 value: at most one unit in the last place apart
        tolerance = 4 * torch.finfo(got.dtype).eps
        assert (got.float() - want.float()).abs().max() <= tolerance * want.float().abs().max()
    assert truth is not None


def test_norm_without_weight(plugins):
    torch.manual_seed(0)
    stock = nn.RMSNorm(64, eps=1e-6, elementwise_affine=False)
    module = convert(nn.RMSNorm(64, eps=1e-6, elementwise_affine=False), plugins)
    x = torch.randn(2, 16, 64, dtype=torch.bfloat16)
    (y, dx, _), (want, want_dx, _) = forward_backward(module, x), forward_backward(stock, x)
    torch.testing.assert_close(y, want, rtol=1e-2, atol=1e-3)
    torch.testing.assert_close(dx, want_dx, rtol=1e-2, atol=1e-3)
    assert module.state_dict() == {}


def test_norm_with_frozen_weight(plugins):
    module = nn.RMSNorm(8)
    module.weight.requires_grad_(False)
    module = convert(module, plugins)
    x = torch.randn(3, 8, requires_grad=True)
    module(x).sum().backward()
    assert module.weight.grad is None
    assert x.grad is not None


def test_norm_over_two_dims_and_on_a_view(plugins):
    torch.manual_seed(0)
    stock, module = nn.RMSNorm((3, 4)), convert(nn.RMSNorm((3, 4)), plugins)
    x = torch.randn(5, 3, 8)[..., :4]
    torch.testing.assert_close(module(x), stock(x))


def test_norm_keeps_what_the_host_reads(plugins):
    module = convert(nn.RMSNorm(8, eps=1e-4), plugins)
    assert (module.normalized_shape, module.eps, module.elementwise_affine) == ((8,), 1e-4, True)
    assert bool(module)
    module.weight.data.fill_(3)
    module.reset_parameters()
    assert torch.equal(module.weight, torch.ones(8))
    assert isinstance(module, nn.RMSNorm)
    assert "RMSNorm" in type(module).__name__


def test_norm_in_float64_is_refused_with_the_dtypes(plugins):
    module = convert(nn.RMSNorm(8), plugins).double()
    with pytest.raises(ValueError, match="float64"):
        module(torch.randn(2, 8, dtype=torch.float64))


class ZeroCentredRMSNorm(nn.RMSNorm):
    def forward(self, x):
        return torch.nn.functional.rms_norm(x, self.normalized_shape, self.weight + 1, self.eps)


class LateCastRMSNorm(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x):
        return self.weight * x


class PlainSubclass(nn.RMSNorm):
    """Same mathematics, another name."""


@pytest.mark.parametrize("cls", [ZeroCentredRMSNorm, LateCastRMSNorm])
def test_look_alike_with_other_mathematics_is_refused_with_a_reason(cls, plugins):
    with pytest.raises(UnmatchedConverterError, match="mathematics"):
        convert(cls(8), plugins)


def test_subclass_with_the_same_forward_converts(plugins):
    module = convert(PlainSubclass(8), plugins)
    assert isinstance(module, PlainSubclass)
    assert type(module).__name__ == "NPUPlainSubclass"


def test_forward_replaced_on_the_instance_is_refused(plugins):
    module = nn.RMSNorm(8)
    module.forward = lambda x: x
    with pytest.raises(UnmatchedConverterError, match="replaced on the instance"):
        convert(module, plugins)


def test_norm_pickles(plugins):
    module = convert(nn.RMSNorm(8), plugins)
    other = pickle.loads(pickle.dumps(module))
    x = torch.randn(2, 8)
    assert torch.equal(other(x), module(x))


@pytest.mark.parametrize("affine", [True, False])
def test_norm_compiles_in_one_graph(affine, plugins):
    torch._dynamo.reset()
    module = convert(nn.RMSNorm(8, elementwise_affine=affine), plugins)
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    x = torch.randn(2, 8, requires_grad=True)
    y = compiled(x)
    torch.testing.assert_close(y, module(x))
    (a,) = torch.autograd.grad(y.square().sum(), x)
    (b,) = torch.autograd.grad(module(x).square().sum(), x)
    torch.testing.assert_close(a, b)
