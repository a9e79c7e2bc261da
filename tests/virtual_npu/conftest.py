"""Tests that run on a virtual NPU: start pytest below ``torchtitan-npu virtual-npu --``."""

import pytest

from torchtitan_npu_core.testing import virtual_npu

if not virtual_npu.is_active():
    collect_ignore_glob = ["test_*.py"]


def pytest_report_header():
    if not virtual_npu.is_active():
        return "tests/virtual_npu: not collected, no virtual NPU in this process"
    return None


@pytest.fixture(autouse=True)
def _seed():
    import torch

    torch.manual_seed(0)
