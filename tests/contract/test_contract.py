"""What plugins declare about torch_npu's operators, against torch_npu itself."""

import json
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from tests.contract.cases import CASES
from torchtitan_npu_core.errors import DeviceLimitError
from torchtitan_npu_core.loading import discover_and_load
from torchtitan_npu_core.operators import declared_specs
from torchtitan_npu_core.testing import CONTRACT_CHECKS, Call, OperatorCase, operator_checks
from torchtitan_npu_core.testing.case_checks import check_formula, check_gradients
from torchtitan_npu_core.testing.checks import PromiseError
from torchtitan_npu_core.testing.contract_checks import (
    check_derivative,
    check_meta,
    check_schema,
    observed_derivative,
)

DECLARED = {n: s for n, s in declared_specs(discover_and_load()).items() if n.startswith("npu::")}


def test_every_declared_operator_has_a_case():
    assert {case.operator for case in CASES} == set(DECLARED)


@pytest.mark.parametrize("check", operator_checks(CASES, CONTRACT_CHECKS))
def test_operator(check):
    check()


# torch_npu's autograd above our kernels is what trains
ON_DEVICE = [
    *operator_checks(CASES, {"formula": check_formula}),
    *operator_checks([c for c in CASES if c.gradients], {"gradients": check_gradients}),
]


@pytest.mark.usefixtures("_on_device")
@pytest.mark.parametrize("check", ON_DEVICE)
def test_operator_on_the_device(check):
    try:
        check()
    except DeviceLimitError as error:
        pytest.skip(str(error))


# ---------------------------------------------------------------- registration steps aside

BEFORE_AND_AFTER = """
import json, sys
import torch
from torch.distributed.tensor import DTensor
from torchtitan_npu_core.loading import discover_and_load
from torchtitan_npu_core.operators import declared_specs, existing_operator, register_operator

TABLES = ("op_to_rules", "op_strategy_funcs", "op_single_dim_strategy_funcs")
specs = {n: s for n, s in declared_specs(discover_and_load()).items() if n.startswith("npu::")}
operators = {name: existing_operator(name) for name in specs}

def seen():
    propagator = DTensor._op_dispatcher.sharding_propagator
    tables = [getattr(propagator, t, {}) for t in TABLES]
    return {
        name: {
            "kernels": torch._C._dispatch_dump(name).splitlines(),
            "sharding": [id(t[op]) for t in tables if op in t],
        }
        for name, op in operators.items()
    }

before = seen()
providers = {name: register_operator(spec).provider for name, spec in specs.items()}
print(json.dumps([before, seen(), providers]))
"""


@pytest.fixture(scope="module")
def registration():
    """What the dispatcher and DTensor know, before and after; in a process that starts anew."""
    done = subprocess.run([sys.executable, "-c", BEFORE_AND_AFTER], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", sorted(DECLARED))
def test_registration_steps_aside(name, registration):
    before, after, providers = (part[name] for part in registration)
    assert providers == "torch_npu"
    # read before anything of ours is there
    derivative = next(case.derivative for case in CASES if case.operator == name)
    lossy = not any(line.startswith("AutogradPrivateUse1") for line in before["kernels"])
    assert lossy == (derivative == "C")
    assert [line for line in before["kernels"] if line not in after["kernels"]] == []
    added = {line.partition(":")[0] for line in after["kernels"] if line not in before["kernels"]}
    # tensors outside the device; a backward that raises where there was none
    assert added == {"CPU", "AutogradCPU"} | ({"AutogradPrivateUse1"} if lossy else set())
    assert before["sharding"] == after["sharding"] or not before["sharding"]
    assert after["sharding"]


# ---------------------------------------------------------------- the checks can fail

RMS_NORM = next(case for case in CASES if case.operator == "npu::npu_rms_norm")


def test_listed_difference_that_is_gone_fails():
    stale = replace(RMS_NORM, fake_differences={"rows": "no longer so"})
    with pytest.raises(PromiseError, match=r"listed difference .*\(rows: no longer so\)"):
        check_meta(stale, "rows")


def wrong_fake(change):
    kernels = RMS_NORM.implementation()
    return replace(
        RMS_NORM, kernels=replace(kernels, fake=lambda *args: change(*kernels.fake(*args)))
    )


@pytest.mark.parametrize(
    "change",
    [
        lambda y, rstd: (y, rstd.half()),
        lambda y, rstd: (y, rstd[..., 0]),
        lambda y, rstd: (y,),
        lambda y, rstd: (y, rstd, rstd),
        lambda y, rstd: (y.mT.contiguous().mT, rstd),
    ],
    ids=["dtype", "shape", "output missing", "output too many", "strides"],
)
def test_fake_kernel_that_differs_fails(change):
    with pytest.raises(PromiseError, match="npu_rms_norm: its fake kernel"):
        check_meta(wrong_fake(change), "rows")


def test_call_that_torch_npu_refuses_is_a_difference():
    refused = replace(
        RMS_NORM,
        inputs={"no tensor": lambda dtype: Call(torch.ones(2, 3, dtype=dtype), 1)},
        kernels=replace(RMS_NORM.implementation(), fake=lambda x, gamma: (x, x)),
        fake_differences=None,
    )
    with pytest.raises(PromiseError, match="RuntimeError"):
        check_meta(refused, "no tensor")


def test_other_schema_fails(monkeypatch):
    spec = replace(DECLARED["npu::npu_rms_norm"], schema="npu_rms_norm(Tensor x) -> Tensor")
    monkeypatch.setattr(OperatorCase, "registered", lambda self: SimpleNamespace(spec=spec))
    with pytest.raises(PromiseError, match="declared npu::npu_rms_norm"):
        check_schema(RMS_NORM)


@pytest.mark.parametrize("claimed", ["B", "C"])
def test_other_derivative_class_fails(claimed):
    with pytest.raises(PromiseError, match=f"class {claimed}.*found A"):
        check_derivative(replace(RMS_NORM, derivative=claimed, gradients=None))


def operator(name, *shapes):
    """A case of one of torch_npu's operators that no plugin declares."""
    return OperatorCase(
        operator=name,
        inputs={"it": lambda dtype: Call(*(torch.ones(shape, dtype=dtype) for shape in shapes))},
        dtypes=[torch.float32],
        formula=lambda *args: args,
        derivative="C",
        kernels=RMS_NORM.implementation(),
    )


def test_class_of_an_operator_whose_backward_raises():
    norm = operator("npu::npu_add_rms_norm", (3, 8), (3, 8), (8,))
    assert observed_derivative(norm) == "B"


def test_class_of_an_operator_that_loses_gradients():
    routing = operator("npu::npu_rms_norm_backward", (3, 8), (3, 8), (8,), (3, 1))
    assert observed_derivative(routing) == "C"
