import subprocess
import sys

import torch

from tests.op_norm_rope import models
from torchtitan_npu_core.apply import convert_model

LOAD = """
import sys, torch
module, x, want = torch.load(sys.argv[1], weights_only=False)
assert torch.equal(module(x), want)
"""


def test_converted_module_loads_and_runs_in_a_fresh_process(tmp_path, plugins):
    block = torch.nn.Sequential(torch.nn.RMSNorm(8))
    convert_model(block, ["npu_rms_norm"], plugins=plugins)
    x = torch.randn(3, 8)
    torch.save((block, x, block(x).detach()), tmp_path / "m.pt")
    done = subprocess.run(
        [sys.executable, "-c", LOAD, tmp_path / "m.pt"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_state_dicts_are_interchangeable(tmp_path, plugins):
    stock, model = models.build("deepseek_v3", seed=1), models.build("deepseek_v3", seed=2)
    convert_model(model, ["npu_rms_norm", "npu_rope"], plugins=plugins)
    torch.save(stock.state_dict(), tmp_path / "s.pt")
    with torch.device("cpu"):  # torch_npu loads through tensors of the default device
        state = torch.load(tmp_path / "s.pt")
    model.load_state_dict(state, strict=True)
    models.assert_alike(models.run(model, "deepseek_v3"), models.run(stock, "deepseek_v3"), 1e-5)
