import subprocess
import sys

import torch

from torchtitan_npu_core import cpu_device

UNCHANGED = """
import sys, torch
def snapshot(module):
    return {k: id(v) for k, v in vars(module).items()}
before = [snapshot(m) for m in (torch._utils, torch.cpu)]
from torchtitan_npu_core import cpu_device
cpu_device.install()
after = [snapshot(m) for m in (torch._utils, torch.cpu)]
assert before == after
import torchtitan.tools.utils as u
assert u.device_type == "cpu", u.device_type
assert u.device_module.current_device() == 0
cpu_device.install()
"""


def test_torch_is_unchanged_after_install():
    done = subprocess.run([sys.executable, "-c", UNCHANGED], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_install_after_torchtitan_is_a_clear_error():
    code = (
        "import torchtitan.tools.utils\n"
        "from torchtitan_npu_core import cpu_device\n"
        "cpu_device.install()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1
    assert "torchtitan-npu train" in done.stderr


def test_device_module_answers_what_the_host_asks():
    module = cpu_device.CPUDeviceModule()
    assert module.current_device() == 0
    assert module.get_device_name("cpu").startswith("CPU")
    assert module.get_device_properties("cpu").total_memory == cpu_device.total_memory() > 0
    assert module.empty_cache() is None
    # everything else is torch.cpu's own
    assert module.synchronize is torch.cpu.synchronize


def test_memory_numbers_follow_an_allocation():
    module = cpu_device.CPUDeviceModule()
    module.reset_peak_memory_stats()
    before = module.memory_stats()["reserved_bytes.all.peak"]
    block = torch.ones(64 * 2**20, dtype=torch.uint8)
    grown = module.memory_stats()["reserved_bytes.all.peak"] - before
    assert grown > 0.9 * block.numel()
