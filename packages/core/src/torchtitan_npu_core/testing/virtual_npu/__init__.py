"""A virtual NPU: the real torch_npu with devices whose memory is host memory.

A program runs on it unchanged. torch_npu is the published wheel, with its Python code, autograd
formulas and fake kernels; below them, every operator of ``aten`` is computed by the CPU kernel of
the same name on the same memory, and every operator of ``npu`` by the reference kernel that an
installed plugin declares, with its argument checks and the limits of the chosen device family.
Numbers are the CPU's. Memory that was allocated and not written is NaN.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from torchtitan_npu_core.errors import CommandError
from torchtitan_npu_core.limits import TARGET_VARIABLE
from torchtitan_npu_core.specs import DEVICE_FAMILIES

FAMILY_VARIABLE = "TORCHTITAN_NPU_VIRTUAL_FAMILY"
DEVICES_VARIABLE = "TORCHTITAN_NPU_VIRTUAL_DEVICES"
FOLDER_VARIABLE = "TORCHTITAN_NPU_VIRTUAL_FOLDER"

_PATHS = {"LD_LIBRARY_PATH": "lib", "PYTHONPATH": "site"}


def environment(
    *, family: str = "a2", devices: int = 1, base: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Environment in which a Python program finds a virtual NPU.

    The stand-ins for CANN's libraries are built when they do not exist yet.

    Args:
        family: Device family, a key of ``DEVICE_FAMILIES``.
        devices: Number of devices, at least 1.
        base: Environment to start from; this process's by default.

    Raises:
        CommandError: If torch_npu or a compiler is missing, or an argument makes no sense.
    """
    from torchtitan_npu_core.testing.virtual_npu.stubs import build

    if family not in DEVICE_FAMILIES:
        raise CommandError(
            f"no device family {family!r}; there are {', '.join(map(repr, DEVICE_FAMILIES))}"
        )
    if not 1 <= devices <= 64:
        raise CommandError(f"{devices} devices; a virtual machine has 1 to 64")
    built = build()
    env = dict(os.environ if base is None else base)
    for variable, folder in _PATHS.items():
        env[variable] = os.pathsep.join(filter(None, (str(built / folder), env.get(variable))))
    env[FOLDER_VARIABLE] = str(built)
    env[FAMILY_VARIABLE] = family
    env[DEVICES_VARIABLE] = str(devices)
    env.pop(TARGET_VARIABLE, None)  # the device says what it is
    # torch loads the devices by itself, in this program and in all it starts
    env["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "1"
    # calls happen in the thread that makes them, not in torch_npu's queue
    env["TASK_QUEUE_ENABLE"] = "0"
    return env


def is_active() -> bool:
    """Whether this process runs on a virtual NPU."""
    return FAMILY_VARIABLE in os.environ


def without(base: Mapping[str, str]) -> dict[str, str]:
    """Environment of a process on a virtual NPU, as it was before: without one.

    Args:
        base: Such an environment.
    """
    env = dict(base)
    folders = env.pop(FOLDER_VARIABLE, "")
    for variable, name in _PATHS.items():
        parts = env.get(variable, "").split(os.pathsep)
        kept = [part for part in parts if part and part != os.path.join(folders, name)]
        env[variable] = os.pathsep.join(kept)
    for variable in (FAMILY_VARIABLE, DEVICES_VARIABLE, "TASK_QUEUE_ENABLE"):
        env.pop(variable, None)
    env["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    return env
