"""All proofs about the norm and rotary operators that follow from their cases."""

import functools

import pytest
import torch

from tests.op_norm_rope.cases import CASES, NORM, ROTARY
from torchtitan_npu_core.testing import operator_checks
from torchtitan_npu_core.testing.case_checks import check_precision


@pytest.mark.filterwarnings("ignore:Mismatch dtype")  # stock's, for gamma in float32
@pytest.mark.parametrize("check", operator_checks(CASES))
def test_operator(check):
    check()


FLOAT32 = {"float32": functools.partial(check_precision, dtypes=[torch.float32])}


@pytest.mark.parametrize("check", operator_checks([NORM, ROTARY], FLOAT32))
def test_float32_is_as_exact_as_stock(check):
    check()
