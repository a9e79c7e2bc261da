"""Pytest fixtures for plugin tests. Opt in with ``pytest_plugins`` in a conftest."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from torchtitan_npu_core.testing.distributions import write_distribution


@pytest.fixture
def fake_distribution(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Path]]:
    """Install distributions for one test.

    The fixture's value takes the arguments of ``write_distribution``, ``folder`` aside, plus
    ``site``: name of the folder to install into, a new one or one used before.
    """
    written: set[str] = set()

    def install(name: str, *, site: str = "site", **kwargs: Any) -> Path:
        folder = tmp_path / site
        metadata = write_distribution(folder, name, **kwargs)
        if str(folder) not in sys.path:
            monkeypatch.syspath_prepend(str(folder))
        written.update(kwargs.get("modules") or ())
        importlib.invalidate_caches()
        return metadata

    yield install
    for module in written:
        sys.modules.pop(module, None)
