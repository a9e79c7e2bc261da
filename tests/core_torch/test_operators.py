from dataclasses import replace

import pytest
import torch

from torchtitan_npu_core import operators
from torchtitan_npu_core.errors import (
    NotDifferentiableError,
    OperatorArgumentError,
    OperatorVersionError,
)
from torchtitan_npu_core.operators import OperatorKernels, register_operator
from torchtitan_npu_core.specs import OperatorSpec


def check(x):
    if x.dim() != 1:
        raise OperatorArgumentError("tested::double takes one dim")


DOUBLE = OperatorKernels(
    reference=lambda x: x * 2,
    fake=torch.empty_like,
    check=check,
    measure=lambda x: {},
    setup_context=lambda ctx, inputs, output: None,
    backward=lambda ctx, grad: grad * 2,
)
LOSSY = OperatorKernels(
    reference=lambda x: x * 2,
    fake=torch.empty_like,
    check=check,
    measure=lambda x: {},
)


def spec(name, kernels):
    return OperatorSpec(
        name=f"tested::{name}",
        schema=f"{name}(Tensor x) -> Tensor",
        kernels=f"{__name__}:{kernels}",
    )


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    import sys
    import types

    module = types.ModuleType(__name__)
    module.DOUBLE, module.LOSSY = DOUBLE, LOSSY
    monkeypatch.setitem(sys.modules, __name__, module)


def test_operator_runs_on_cpu_meta_and_under_fake_tensors():
    register_operator(spec("double", "DOUBLE"))
    x = torch.ones(3, requires_grad=True)
    y = torch.ops.tested.double(x)
    y.sum().backward()
    assert torch.equal(y, 2 * x)
    assert torch.equal(x.grad, torch.full((3,), 2.0))
    assert torch.ops.tested.double(torch.ones(3, device="meta")).shape == (3,)
    torch.library.opcheck(torch.ops.tested.double.default, (x.detach().requires_grad_(),))


def test_registering_again_changes_nothing():
    first = register_operator(spec("double", "DOUBLE"))
    assert register_operator(spec("double", "DOUBLE")) is first


def test_another_schema_under_the_same_name_is_refused():
    register_operator(spec("double", "DOUBLE"))
    other = OperatorSpec(
        name="tested::double", schema="double(Tensor y) -> Tensor", kernels=f"{__name__}:DOUBLE"
    )
    with pytest.raises(ValueError, match="declared twice"):
        register_operator(other)


def test_operator_without_derivative_raises_in_backward_instead_of_losing_the_gradient():
    register_operator(spec("lossy", "LOSSY"))
    x = torch.ones(3, requires_grad=True)
    y = torch.ops.tested.lossy(x)
    with pytest.raises(NotDifferentiableError, match="tested::lossy has no derivative"):
        y.sum().backward()


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_arguments_are_checked_on_real_and_on_meta_tensors(device):
    register_operator(spec("double", "DOUBLE"))
    with pytest.raises(OperatorArgumentError, match="one dim"):
        torch.ops.tested.double(torch.ones(2, 2, device=device))


def test_device_library_that_cannot_be_imported_is_reported_once(fake_distribution, caplog):
    fake_distribution(
        "torch-npu", modules={"torch_npu": "raise ImportError('libhccl.so: cannot open')"}
    )
    operators.device_library_problem.cache_clear()
    try:
        for _ in range(2):
            assert "libhccl.so" in operators.device_library_problem()
        assert len([r for r in caplog.records if "libhccl.so" in r.getMessage()]) == 1
    finally:
        operators.device_library_problem.cache_clear()


def test_operators_of_the_device_library_are_not_replaced(fake_distribution):
    # a stand-in for torch_npu that owns one operator of the two
    source = (
        "import torch\n"
        "lib = torch.library.Library('npu', 'FRAGMENT')\n"
        "lib.define('theirs(Tensor x) -> Tensor')\n"
        "lib.impl('theirs', lambda x: x + 100, 'CompositeExplicitAutograd')\n"
    )
    fake_distribution("torch-npu", modules={"torch_npu": source})
    operators.device_library_problem.cache_clear()
    try:
        owned = OperatorSpec(
            name="npu::theirs", schema="theirs(Tensor x) -> Tensor", kernels=f"{__name__}:DOUBLE"
        )
        added = OperatorSpec(
            name="npu::ours", schema="ours(Tensor x) -> Tensor", kernels=f"{__name__}:DOUBLE"
        )
        assert register_operator(owned).provider == "torch_npu"
        assert torch.ops.npu.theirs(torch.zeros(1)).item() == 100
        with pytest.raises(OperatorVersionError, match=r"npu::ours .*does not have the operator"):
            register_operator(added)
        other = replace(owned, schema="theirs(Tensor x, int n) -> Tensor")
        operators._registered.pop("npu::theirs")
        with pytest.raises(OperatorVersionError, match="the call gives n"):
            register_operator(other)
        # a form that leaves the new argument out fits
        newer = replace(owned, schema="theirs(Tensor x, int n=1) -> Tensor", calls=("x",))
        assert register_operator(newer).provider == "torch_npu"
    finally:
        operators.device_library_problem.cache_clear()


def test_operator_of_a_vendor_library_is_used():
    library = torch.library.Library("vendor", "FRAGMENT")
    library.define("mine(Tensor x) -> Tensor")
    library.impl("mine", lambda x: x + 5, "CompositeExplicitAutograd")
    made = OperatorSpec(
        name="vendor::mine", schema="mine(Tensor x) -> Tensor", kernels=f"{__name__}:DOUBLE"
    )
    assert register_operator(made).provider == "library"
    assert torch.ops.vendor.mine(torch.zeros(1)).item() == 5
