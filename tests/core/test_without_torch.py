import subprocess
import sys

import pytest

MODULES = [
    "torchtitan_npu_core",
    "torchtitan_npu_core.registry",
    "torchtitan_npu_core.loading",
    "torchtitan_npu_core.environment",
    "torchtitan_npu_core.report",
    "torchtitan_npu_core.limits",
    "torchtitan_npu_core.assets",
    "torchtitan_npu_core.configs",
    "torchtitan_npu_core.cli.list",
    "torchtitan_npu_core.cli.explain",
    "torchtitan_npu_core.cli.plan",
    "torchtitan_npu_core.cli.train",
    "torchtitan_npu_core.testing.pytest_plugin",
]


@pytest.mark.parametrize("command", [["plan", "quickstart"], ["train", "quickstart"]])
def test_command_that_needs_torch_says_how_to_get_it(command, tmp_path):
    # a Python that cannot find torch, whether it is installed or not
    code = (
        "import sys\n"
        "from torchtitan_npu_core import assets, compat\n"
        "from torchtitan_npu_core.cli import main\n"
        "assets.tokenizer_folder = assets.text_folder = lambda: '.'\n"
        "compat.installed_version = lambda name: None\n"
        "main(sys.argv[1:])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *command], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 1
    assert "pip install 'torchtitan-npu-core[cpu]'" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("module", MODULES)
def test_module_imports_without_torch(module):
    code = f"import sys, {module}; assert not {{'torch', 'torchtitan'}} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
