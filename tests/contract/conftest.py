"""Tests against the real torch_npu: start pytest below ``torchtitan-npu virtual-npu --``."""

import pytest

from torchtitan_npu_core.testing import virtual_npu

if not virtual_npu.is_active():
    collect_ignore_glob = ["test_*.py"]


def pytest_report_header():
    if not virtual_npu.is_active():
        return "tests/contract: not collected, no torch_npu in this process"
    return None


@pytest.fixture
def _on_device():
    import torch

    with torch.device("npu"):
        yield
