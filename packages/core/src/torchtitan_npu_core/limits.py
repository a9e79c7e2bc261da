"""Limits of device families: an error when the job targets one, a warning otherwise."""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torchtitan_npu_core.errors import DeviceLimitError, OptionValueError
from torchtitan_npu_core.specs import DEVICE_FAMILIES, DeviceLimit, OperatorSpec

TARGET_VARIABLE = "TORCHTITAN_NPU_TARGET_DEVICE"

_target: ContextVar[str] = ContextVar("torchtitan_npu_target", default="")


def target_device() -> str:
    """Device family the job targets, or an empty string.

    Set with ``target`` in the ``[npu]`` section, or with ``TORCHTITAN_NPU_TARGET_DEVICE``; on a
    machine with an NPU it is that device's family.

    Raises:
        OptionValueError: If the variable names no known family.
    """
    return _target.get() or environment_target()


def environment_target() -> str:
    """Device family named by ``TORCHTITAN_NPU_TARGET_DEVICE``, or an empty string.

    Raises:
        OptionValueError: If the variable names no known family.
    """
    family = os.environ.get(TARGET_VARIABLE, "")
    if family and family not in DEVICE_FAMILIES:
        known = ", ".join(repr(name) for name in DEVICE_FAMILIES)
        raise OptionValueError("environment", TARGET_VARIABLE, family, f"one of {known}")
    return family


@contextmanager
def targeting(family: str) -> Iterator[None]:
    """Enforce the limits of one device family inside the block."""
    if family and family not in DEVICE_FAMILIES:
        raise ValueError(f"unknown device family {family!r}, known: {sorted(DEVICE_FAMILIES)}")
    token = _target.set(family)
    try:
        yield
    finally:
        _target.reset(token)


def set_target(family: str) -> None:
    """Enforce the limits of one device family from now on, in this process."""
    _target.set(family)


def violations(
    limits: Sequence[DeviceLimit], quantities: Mapping[str, Any], family: str
) -> list[str]:
    """Describe every limit of a device family that the given quantities break."""
    found = []
    for limit in limits:
        if family in limit.families and limit.quantity in quantities:
            value = quantities[limit.quantity]
            wrong = limit.violation(value)
            if wrong:
                reason = f" ({limit.reason})" if limit.reason else ""
                found.append(f"{limit.quantity} is {value}, {wrong}{reason}")
    return found


@functools.cache
def _warn_once(message: str) -> None:
    warnings.warn(message, UserWarning, stacklevel=2)


def enforce_limits(spec: OperatorSpec, quantities: Mapping[str, Any]) -> None:
    """Raise if the targeted family cannot run a call; without a target, warn once.

    Raises:
        DeviceLimitError: With every limit that is broken.
    """
    if not spec.limits:
        return
    family = target_device()
    if family:
        broken = violations(spec.limits, quantities, family)
        if broken:
            raise DeviceLimitError(spec.name, family, broken)
        return
    # the same limit of several families is one warning
    families: dict[str, list[str]] = {}
    for other in DEVICE_FAMILIES:
        broken = violations(spec.limits, quantities, other)
        if broken:
            families.setdefault("; ".join(broken), []).append(other)
    for problem, refusing in families.items():
        _warn_once(f"{spec.name} would be refused on device family {'/'.join(refusing)}: {problem}")


def family_of(device_name: str) -> str:
    """Device family of a product name such as ``"Ascend910B1"``, or an empty string."""
    for part, family in (("910_93", "a3"), ("910B", "a2"), ("950", "950")):
        if part in device_name:
            return family
    return ""
