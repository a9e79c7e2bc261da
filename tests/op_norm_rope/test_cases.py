"""All proofs about the norm and rotary operators that follow from their cases."""

import pytest

from tests.op_norm_rope.cases import CASES
from torchtitan_npu_core.testing import operator_checks


@pytest.mark.filterwarnings("ignore:Mismatch dtype")  # stock's, for gamma in float32
@pytest.mark.parametrize("check", operator_checks(CASES))
def test_operator(check):
    check()
