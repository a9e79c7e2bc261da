"""The case kit on an operator of its own: right kernels pass, wrong ones are noticed."""

import sys
import types
from dataclasses import replace

import pytest
import torch

from torchtitan_npu_core.operators import OperatorKernels, register_operator
from torchtitan_npu_core.specs import OperatorSpec
from torchtitan_npu_core.testing import Call, Mutation, OperatorCase, operator_checks
from torchtitan_npu_core.testing.case_checks import (
    check_formula,
    check_gradient_formula,
    check_gradients,
)
from torchtitan_npu_core.testing.case_suite import CHECKS, check_mutation
from torchtitan_npu_core.testing.checks import PromiseError

FP32, BF16 = torch.float32, torch.bfloat16
NAME = "tested_case::scaled_cube"


def wide(x):
    return x if x.dtype == torch.float64 else x.float()


def cube(x, factor=2.0):
    return (factor * wide(x) ** 3).to(x.dtype).contiguous()


def setup_context(ctx, inputs, output):
    ctx.save_for_backward(inputs[0])
    ctx.factor = inputs[1]


def backward(ctx, grad):
    (x,) = ctx.saved_tensors
    return (3 * ctx.factor * wide(x) ** 2 * wide(grad)).to(x.dtype), None


KERNELS = OperatorKernels(
    reference=cube,
    fake=lambda x, factor=2.0: torch.empty(x.shape, dtype=x.dtype, device=x.device),
    check=lambda x, factor=2.0: None,
    measure=lambda x, factor=2.0: {},
    setup_context=setup_context,
    backward=backward,
)


def wrong(name, caught_by, function, field="reference"):
    return Mutation(name=name, caught_by=caught_by, kernels={field: function})


CASE = OperatorCase(
    operator=NAME,
    inputs={
        "row": lambda dtype: Call(torch.randn(7, dtype=torch.float64).to(dtype)),
        "transposed": lambda dtype: Call(torch.randn(3, 2).to(dtype).t(), factor=0.7),
        "empty": lambda dtype: Call(torch.empty(0, 3, dtype=dtype)),
    },
    dtypes=(FP32, BF16),
    formula=lambda x, factor=2.0: factor * x.double() * x.double() * x.double(),
    gradients=lambda begin, x, factor=2.0: [begin[0].double() * factor * 3 * x.double() ** 2],
    mutations=(
        wrong("square", "formula", lambda x, factor=2.0: factor * x**2),
        wrong("other-default", "formula", lambda x, factor=1.0: cube(x, factor)),
        wrong("flat", "formula", lambda x, factor=2.0: cube(x, factor).flatten()),
        wrong("two-outputs", "formula", lambda x, factor=2.0: [cube(x, factor)] * 2),
        wrong(
            "factor-after-cast",
            "precision",
            lambda x, factor=2.0: (wide(x) ** 3).to(x.dtype) * factor,
        ),
        wrong("always-float32", "fake", lambda x, factor=2.0: cube(x.float(), factor)),
        wrong(
            "strides-of-input",
            "fake",
            lambda x, factor=2.0: torch.empty_like(x).copy_(cube(x, factor)),
        ),
        wrong("lost", "gradients", lambda ctx, grad: (None, None), "backward"),
        wrong(
            "doubled", "gradients", lambda ctx, grad: (2 * backward(ctx, grad)[0], None), "backward"
        ),
        wrong(
            "changes-its-input", "opcheck", lambda x, factor=2.0: x.copy_(cube(x, factor)).clone()
        ),
    ),
)


@pytest.fixture(scope="module", autouse=True)
def _operator():
    module = sys.modules["tested_case_kernels"] = types.ModuleType("tested_case_kernels")
    module.KERNELS = KERNELS
    schema = "scaled_cube(Tensor x, float factor=2.0) -> Tensor"
    register_operator(OperatorSpec(name=NAME, schema=schema, kernels="tested_case_kernels:KERNELS"))
    yield
    del sys.modules["tested_case_kernels"]


@pytest.mark.parametrize("check", operator_checks([CASE]))
def test_right_kernels_pass_and_mutations_are_noticed(check):
    check()


def test_ids_name_operator_check_and_label():
    ids = [parameter.id for parameter in operator_checks([CASE])]
    assert len(ids) == len(set(ids))
    assert "scaled_cube-formula-transposed" in ids
    assert "scaled_cube-mutation-factor-after-cast" in ids


@pytest.mark.parametrize("check", CHECKS)
def test_mutation_that_changes_nothing_is_an_error(check):
    nothing = Mutation(name="nothing", caught_by=check, kernels={})
    with pytest.raises(PromiseError, match=f"check '{check}' notices 'nothing'"):
        check_mutation(CASE, nothing)


def test_mutation_leaves_the_operator_as_it_is():
    check_mutation(CASE, CASE.mutations[0])
    check_formula(CASE, "row")


def test_mutation_that_crashes_is_not_noticed():
    def crash(x, factor=2.0):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        check_mutation(CASE, wrong("crash", "formula", crash))


@pytest.mark.parametrize(
    "gradients",
    [
        lambda begin, x, factor=2.0: [begin[0].double() * factor * x.double() ** 2],
        lambda begin, x, factor=2.0: [None],
    ],
    ids=["other", "none"],
)
def test_gradient_formula_that_is_no_derivative_fails(gradients):
    with pytest.raises(PromiseError, match=r"is the derivative of the formula \(row"):
        check_gradient_formula(replace(CASE, gradients=gradients), "row")


def test_failure_names_operator_label_and_dtype():
    off = replace(CASE, formula=lambda x, factor=2.0: x.double())
    with pytest.raises(PromiseError, match=r"tested_case::scaled_cube: .*\(row, float64"):
        check_formula(off, "row")


def test_derivative_where_none_is_declared_fails():
    with pytest.raises(PromiseError, match="its backward raises"):
        check_gradients(replace(CASE, derivative="C", gradients=None), "row")


def test_operator_less_exact_than_stock_fails_within_its_budget():
    off = wrong("off", "precision", lambda x, factor=2.0: cube(x, 1.02 * factor))
    generous = replace(CASE, budget=50.0)
    with pytest.raises(PromiseError, match="notices 'off'"):
        check_mutation(generous, off)
    check_mutation(replace(generous, stock=cube), off)


def test_arguments_are_the_same_every_time_and_leave_the_seed_alone():
    torch.manual_seed(3)
    want = torch.rand(1)
    torch.manual_seed(3)
    first, second = (CASE.call("row", FP32).args[0] for _ in range(2))
    assert torch.equal(first, second)
    assert torch.equal(torch.rand(1), want)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"derivative": "D"}, "derivative is 'D'"),
        ({"derivative": "C"}, "gradients are for derivative 'A'"),
        ({"gradients": None}, "gradients are for derivative 'A'"),
        ({"fake_differences": {"gone": "?"}}, "unknown labels {'gone'}"),
    ],
)
def test_case_that_contradicts_itself_is_refused(change, says):
    with pytest.raises(ValueError, match=says):
        replace(CASE, **change)


def test_operator_nobody_declares_is_named():
    with pytest.raises(PromiseError, match="acme::nothing"):
        check_formula(replace(CASE, operator="acme::nothing"), "row")
