"""All proofs about the norm and rotary operators that follow from their cases."""

import functools

import pytest
import torch

from tests.op_norm_rope.cases import CASES, NORM, ROTARY
from torchtitan_npu_core.errors import DeviceLimitError
from torchtitan_npu_core.testing import operator_checks
from torchtitan_npu_core.testing.case_checks import check_precision


def run(check):
    try:
        check()
    except DeviceLimitError as error:
        pytest.skip(str(error))  # on a device the limits of its family hold


@pytest.mark.filterwarnings("ignore:Mismatch dtype")  # stock's, for gamma in float32
@pytest.mark.parametrize("check", operator_checks(CASES))
def test_operator(check, device, request):
    label = request.node.callspec.id
    if device != "cpu" and "mutation" in label:
        pytest.skip("mutations try the checks, not the device")
    if device != "cpu" and "-opcheck-" in label:
        # tests/contract holds them, with a list of the differences
        pytest.skip("opcheck judges registrations, which are torch_npu's there")
    if device != "cpu" and label.endswith("precision-float32-tables"):
        pytest.skip("torch_npu rounds the gradients of float32 tables to the input's dtype")
    run(check)


FLOAT32 = {"float32": functools.partial(check_precision, dtypes=[torch.float32])}


@pytest.mark.parametrize("check", operator_checks([NORM, ROTARY], FLOAT32))
def test_float32_is_as_exact_as_stock(check):
    run(check)
