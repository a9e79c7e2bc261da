import pytest

from torchtitan_npu_core.loading import discover_and_load
from torchtitan_npu_core.operators import register_plugin_operators, registered_operators


@pytest.fixture(scope="session")
def plugins():
    return discover_and_load()


@pytest.fixture(scope="session", autouse=True)
def _operators(plugins):
    record = next(r for r in plugins.records if r.name == "norm_rope")
    register_plugin_operators(plugins, record)


@pytest.fixture
def own_registration():
    """For tests of autograd formulas and fake kernels that torch_npu brings where it is."""
    if any(r.provider == "torch_npu" for r in registered_operators().values()):
        pytest.skip("torch_npu registers these operators itself")
