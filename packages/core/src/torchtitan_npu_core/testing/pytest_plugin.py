"""Pytest fixtures for plugin tests. Opt in with ``pytest_plugins`` in a conftest.

The option ``--device npu`` makes every tensor a test creates without naming a device an npu tensor.
On a machine without NPU, run pytest below ``torchtitan-npu virtual-npu --``.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from torchtitan_npu_core.testing.distributions import write_distribution


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--device``."""
    parser.addoption(
        "--device", default="cpu", help="device that tests create their tensors on (cpu or npu)"
    )


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> str:
    """Device the tests run on, ``cpu`` or what ``--device`` names."""
    return request.config.getoption("--device")


@pytest.fixture(autouse=True)
def _default_device(device: str) -> Iterator[None]:
    if device == "cpu":
        yield
        return
    import torch

    with torch.device(device):
        yield


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
