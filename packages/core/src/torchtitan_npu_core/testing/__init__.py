"""What plugin authors use in their tests.

``check_converter`` needs torch; the ``fake_distribution`` fixture does not. Load the fixture with
``pytest_plugins = ["torchtitan_npu_core.testing.pytest_plugin"]`` in a conftest.
"""

from __future__ import annotations

from typing import Any

__all__ = ["check_converter", "check_operator", "write_distribution"]


def __getattr__(name: str) -> Any:
    # torch only when it is asked for: core's own tests run without it
    if name in ("check_converter", "check_operator"):
        from torchtitan_npu_core.testing import checks

        return getattr(checks, name)
    if name == "write_distribution":
        from torchtitan_npu_core.testing.distributions import write_distribution

        return write_distribution
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
