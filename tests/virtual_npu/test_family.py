"""Device families: ``torchtitan-npu virtual-npu --device FAMILY``."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.virtual_npu.family import CALLS
from torchtitan_npu_core.specs import DEVICE_FAMILIES
from torchtitan_npu_core.testing import virtual_npu

pytestmark = pytest.mark.slow

NAMES = {"a2": "Ascend910B1", "a3": "Ascend910_9391", "950": "Ascend950PR_9589"}
ATLAS = {
    "quarter": "rotary_mode is quarter, must be one of half, interleave",
    "width 896": "head_dim is 896, must be at most 895",
    "width 1024": "head_dim is 1024, must be at most 895",
    "width 1026": "head_dim is 1026, must be at most 895",
    "1000 rows": "half_batch is 1000, must be at most 999",
    "9 dims": "input_dims is 9, must be at most 8",
}
LIMITS = {
    "a2": ATLAS,
    "a3": ATLAS,
    "950": {
        "width 1026": "head_dim is 1026, must be at most 1024",
        "9 dims": "input_dims is 9, must be at most 8",
    },
}


@pytest.fixture(scope="module")
def seen():
    found = {}
    for i, family in enumerate(DEVICE_FAMILIES, 1):
        done = subprocess.run(
            [
                *(sys.executable, "-m", "torchtitan_npu_core", "virtual-npu", "--device", family),
                *("--devices", str(i), "--", sys.executable, "-m", "tests.virtual_npu.family"),
            ],
            # a variable that names another family is not asked
            env=virtual_npu.without(os.environ) | {"TORCHTITAN_NPU_TARGET_DEVICE": "a3"},
            cwd=Path(__file__).parents[2],
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        found[family] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("family", DEVICE_FAMILIES)
def test_the_device_is_of_the_family(family, seen):
    found = seen[family]
    assert found["name"] == NAMES[family]
    assert found["family"] == family
    assert found["devices"] == list(DEVICE_FAMILIES).index(family) + 1
    assert found["sum"] == 3
    assert found["unwritten"] is True


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("family", DEVICE_FAMILIES)
def test_the_limits_are_the_familys(family, call, seen):
    error = seen[family]["errors"][call]
    expected = LIMITS[family].get(call)
    if expected is None:
        assert error == ""
    else:
        assert f"cannot run on device family {family!r}: {expected}" in error
