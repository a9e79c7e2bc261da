"""What plugin authors use in their tests.

Checks and cases need torch; the ``fake_distribution`` fixture does not. Load the fixture with
``pytest_plugins = ["torchtitan_npu_core.testing.pytest_plugin"]`` in a conftest.
"""

from __future__ import annotations

import importlib
from typing import Any

__all__ = [
    "check_converter",
    "check_operator",
    "OperatorCase",
    "Call",
    "Mutation",
    "operator_checks",
    "CONTRACT_CHECKS",
    "CallRecorder",
    "replay_on_meta",
    "write_distribution",
]

_MODULES = {
    "check_converter": "checks",
    "check_operator": "checks",
    "OperatorCase": "operator_cases",
    "Call": "operator_cases",
    "Mutation": "operator_cases",
    "operator_checks": "case_suite",
    "CONTRACT_CHECKS": "contract_checks",
    "CallRecorder": "recording",
    "replay_on_meta": "recording",
    "write_distribution": "distributions",
}


def __getattr__(name: str) -> Any:
    # torch only when it is asked for: core's own tests run without it
    if name in _MODULES:
        return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
