pytest_plugins = ["torchtitan_npu_core.testing.pytest_plugin"]
