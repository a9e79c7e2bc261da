"""What plugins declare about torch_npu's operators, against torch_npu itself."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from tests.contract.cases import CASES
from torchtitan_npu_core.errors import DeviceLimitError
from torchtitan_npu_core.loading import discover_and_load
from torchtitan_npu_core.operators import declared_specs
from torchtitan_npu_core.testing import CONTRACT_CHECKS, operator_checks
from torchtitan_npu_core.testing.case_checks import check_gradients
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


# the formulas of torch_npu above our kernels: its autograd is what trains
DIFFERENTIABLE = [case for case in CASES if case.derivative == "A"]


@pytest.mark.usefixtures("_on_device")
@pytest.mark.parametrize("check", operator_checks(DIFFERENTIABLE, {"gradients": check_gradients}))
def test_operator_on_the_device(check):
    try:
        check()
    except DeviceLimitError as error:
        pytest.skip(str(error))
