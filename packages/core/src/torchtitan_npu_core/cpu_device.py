"""What torchtitan assumes of an accelerator, supplied for CPU, in processes of our launcher only.

Nothing here runs on import. ``install`` has to come before the first import of torchtitan.
"""

from __future__ import annotations

import contextlib
import resource
import sys
import time
import types
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch

_MIB = 2**20


def is_needed() -> bool:
    """Whether this machine has no accelerator that torch can see."""
    return torch._utils._get_available_device_type() is None


# ---------------------------------------------------------------- device module


def _status_bytes(key: str) -> int | None:
    try:
        with open("/proc/self/status") as file:
            for line in file:
                if line.startswith(key + ":"):
                    return int(line.split()[1]) * 1024
    except OSError:
        return None
    return None


def peak_memory() -> int:
    """Largest resident size of this process since the last reset, bytes."""
    peak = _status_bytes("VmHWM")
    if peak is not None:
        return peak
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def reset_peak_memory() -> None:
    """Start a new peak, where the system allows it."""
    with contextlib.suppress(OSError), open("/proc/self/clear_refs", "w") as file:
        file.write("5")


def total_memory() -> int:
    """Memory this process may use, bytes: the machine's, or its control group's if smaller."""
    import os

    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError), open(path) as file:
            total = min(total, int(file.read()))
    return total


class CPUDeviceModule(types.ModuleType):
    """``torch.cpu`` with the functions torchtitan calls on every device module."""

    def __init__(self) -> None:
        super().__init__("torchtitan_npu_core.cpu_device.module")

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)

    # what: device name and size for the metrics header
    # why:  torch.cpu has neither get_device_name nor get_device_properties
    # ends: when torch.cpu offers them
    # test: tests/core_torch/test_cpu_device.py::test_device_module_answers_what_the_host_asks
    @staticmethod
    def get_device_name(device: Any = None) -> str:
        import platform

        return f"CPU ({platform.processor() or platform.machine()})"

    @staticmethod
    def get_device_properties(device: Any = None) -> Any:
        return types.SimpleNamespace(name="CPU", total_memory=total_memory())

    # what: an integer device index
    # why:  torch.cpu.current_device() is the string "cpu", which barrier(device_ids=) refuses
    # ends: when torch.cpu.current_device() returns an int
    # test: tests/core_torch/test_cpu_device.py::test_device_module_answers_what_the_host_asks
    @staticmethod
    def current_device() -> int:
        return 0

    # what: memory statistics, as the process's resident size
    # why:  torch.cpu has no allocator statistics; the host prints these numbers at every step
    # ends: when torch.cpu offers them
    # test: tests/core_torch/test_cpu_device.py::test_memory_numbers_follow_an_allocation
    @staticmethod
    def memory_stats(device: Any = None) -> dict[str, int]:
        peak = peak_memory()
        return {
            "active_bytes.all.peak": peak,
            "reserved_bytes.all.peak": peak,
            "num_alloc_retries": 0,
            "num_ooms": 0,
        }

    @staticmethod
    def reset_peak_memory_stats(device: Any = None) -> None:
        reset_peak_memory()

    @staticmethod
    def empty_cache() -> None:
        return None


def install() -> None:
    """Make torchtitan's first import in this process see a CPU device.

    Raises:
        RuntimeError: If torchtitan was imported before.
    """
    loaded = sys.modules.get("torchtitan.tools.utils")
    if loaded is not None:
        if getattr(loaded, "device_type", None) == "cpu":
            return
        raise RuntimeError(
            "torchtitan was imported before the CPU device was installed. Start the job with "
            "'torchtitan-npu train'."
        )
    # what: answers the two questions torchtitan asks torch about the device, during one import
    # why:  without an accelerator it falls back to "cuda"; the values are read at import time
    # ends: when torchtitan accepts CPU as a device
    # test: tests/core_torch/test_cpu_device.py::test_torch_is_unchanged_after_install
    module = CPUDeviceModule()
    with (
        mock.patch.object(torch._utils, "_get_available_device_type", return_value="cpu"),
        mock.patch.object(torch._utils, "_get_device_module", return_value=module),
    ):
        import torchtitan.tools.utils  # noqa: F401


def measured_peak_flops() -> float:
    """Floating-point operations per second of one bfloat16 or float32 matmul, the faster one."""
    best = 0.0
    for dtype in (torch.float32, torch.bfloat16):
        a = torch.ones(1024, 1024, dtype=dtype)
        a @ a
        for _ in range(3):
            start = time.perf_counter()
            a @ a
            best = max(best, 2 * 1024**3 / (time.perf_counter() - start))
    return best


@contextlib.contextmanager
def true_peak_flops() -> Iterator[None]:
    """While a trainer is constructed, let it read this machine's measured peak.

    MFU is then a share of what this machine can do.
    """
    # what: replaces torchtitan's table of peak FLOPS during one construction
    # why:  it knows no CPU and falls back to the number of an A100
    # ends: when the trainer takes the peak from its config
    # test: tests/trainer/test_train.py::test_numbers_on_the_step_line_are_true
    import torchtitan.tools.utils as utils

    peak = measured_peak_flops()
    with mock.patch.object(utils, "get_peak_flops", return_value=peak):
        yield
