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


@pytest.mark.parametrize("module", MODULES)
def test_module_imports_without_torch(module):
    code = f"import sys, {module}; assert not {{'torch', 'torchtitan'}} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
