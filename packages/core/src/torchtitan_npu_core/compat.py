"""The version contract: read a distribution's requirements, compare, explain.

A plugin states what it was tested with as ordinary requirements: core in ``dependencies``, torch,
torch-npu and torchtitan in the ``targets`` extra. A requirement on something that is not installed
is no reason to refuse (core lists plugins without torch); a version outside the range is.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable

import importlib_metadata
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from torchtitan_npu_core.__about__ import __version__
from torchtitan_npu_core.errors import CommandError

CORE = "torchtitan-npu-core"
TARGETS_EXTRA = "targets"


def installed_version(name: str) -> str | None:
    """Version of an installed distribution, or ``None``."""
    if canonicalize_name(name) == CORE:
        return __version__
    try:
        return importlib_metadata.version(name)
    except importlib_metadata.PackageNotFoundError:
        return None


def require_torch(purpose: str) -> None:
    """Refuse to go on without torch and torchtitan, and keep torch_npu from taking torch down.

    torch loads torch_npu by itself, and fails to import where CANN is missing. Whoever needs
    torch_npu imports it afterwards, and can say what is wrong.

    Args:
        purpose: What needs them, for the message.

    Raises:
        CommandError: If one of them is not installed.
    """
    missing = [name for name in ("torch", "torchtitan") if installed_version(name) is None]
    if missing:
        raise CommandError(
            f"{purpose} needs {' and '.join(missing)}, not installed here. On a machine without an "
            f"NPU: pip install 'torchtitan-npu-core[cpu]'. On an NPU host, install the versions "
            f"that match its driver."
        )
    os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")


def read_requirements(distribution_name: str) -> list[Requirement]:
    """Requirements of a distribution and of its ``targets`` extra that apply here.

    Raises:
        InvalidRequirement: If the metadata holds one that cannot be parsed.
    """
    try:
        lines = importlib_metadata.distribution(distribution_name).requires or []
    except importlib_metadata.PackageNotFoundError:
        return []
    wanted = []
    for line in lines:
        requirement = Requirement(line)
        marker = requirement.marker
        if marker is None or any(marker.evaluate({"extra": e}) for e in ("", TARGETS_EXTRA)):
            wanted.append(requirement)
    return wanted


def mismatches(
    requirements: Iterable[Requirement],
    version_of: Callable[[str], str | None] = installed_version,
) -> list[str]:
    """Describe every requirement that an installed version does not satisfy."""
    found = []
    for requirement in requirements:
        version = version_of(requirement.name)
        if version is None:
            continue
        try:
            # local parts such as '+cpu' and pre-releases on the host are the user's choice
            fits = requirement.specifier.contains(Version(version), prereleases=True)
        except InvalidVersion:
            continue
        if not fits:
            found.append(f"needs {requirement.name} {requirement.specifier}, found {version}")
    return found


def incompatibility(distribution_name: str) -> str | None:
    """Say why a distribution cannot be used with what is installed, or ``None``."""
    try:
        problems = mismatches(read_requirements(distribution_name))
    except (InvalidRequirement, UnicodeDecodeError, OSError) as error:
        return f"its metadata has a requirement that cannot be read: {error}"
    if not problems:
        return None
    return f"{'; '.join(problems)}. Upgrade it: pip install --upgrade {distribution_name}"
