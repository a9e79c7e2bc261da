"""Find installed plugins by reading package metadata. Imports no plugin and no torch."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import importlib_metadata
from packaging.utils import canonicalize_name

from torchtitan_npu_core.hookspecs import ENTRY_POINT_GROUP
from torchtitan_npu_core.specs import ConverterSpec

DISABLE_VARIABLE = "TORCHTITAN_NPU_DISABLE_PLUGINS"
STATES = ("available", "loaded", "disabled", "incompatible", "duplicate", "broken")


@dataclass(slots=True, kw_only=True)
class PluginRecord:
    """What is known about one installed plugin.

    Args:
        name: Entry-point name.
        value: Entry-point value, the module to import.
        distribution: Name of the distribution, or ``"?"`` if its metadata has none.
        version: Version of the distribution.
        location: Where its metadata was found.
        state: One of ``STATES``.
        message: Why it is not usable, for every state but available and loaded.
        traceback: Full text of the exception, for state broken.
        also_at: Other places where the same distribution was found.
        converters: What it offers, once loaded.
        module: The imported plugin module, once loaded.
    """

    name: str
    value: str
    distribution: str
    version: str
    location: str
    state: str = "available"
    message: str = ""
    traceback: str = ""
    also_at: tuple[str, ...] = ()
    converters: tuple[ConverterSpec, ...] = ()
    module: Any = field(default=None, repr=False)

    @property
    def owner(self) -> str:
        """Distribution and version, as messages show them."""
        return f"{self.distribution} {self.version}".strip()

    @property
    def problem(self) -> str:
        """One line that names plugin, distribution and reason."""
        return f"plugin {self.name!r} ({self.owner}) is {self.state}: {self.message}"


def disabled_names(environ: dict[str, str] | None = None) -> set[str]:
    """Plugin or distribution names the user switched off, canonical form."""
    text = (os.environ if environ is None else environ).get(DISABLE_VARIABLE, "")
    return {canonicalize_name(word) for word in re.split(r"[,\s]+", text) if word}


def _entry_points(distribution: Any) -> list[Any]:
    return [ep for ep in distribution.entry_points if ep.group == ENTRY_POINT_GROUP]


def _version(distribution: Any) -> str:
    # a metadata folder without a PKG-INFO or METADATA file has no version to read
    metadata = distribution.metadata
    return (metadata["Version"] if metadata is not None and "Version" in metadata else "") or "?"


def _name(distribution: Any) -> str:
    metadata = distribution.metadata
    name = metadata["Name"] if metadata is not None and "Name" in metadata else None
    if name:
        return name
    # fall back on the folder: 'acme_x-1.0.dist-info', 'acme.x.egg-info'
    folder = os.path.basename(str(getattr(distribution, "_path", "")))
    return re.sub(r"(-\d.*)?\.(dist|egg)-info$", "", folder) or "?"


def _location(distribution: Any) -> str:
    return os.path.realpath(str(getattr(distribution, "_path", "?")))


def _unreadable(location: str, error: Exception) -> PluginRecord | None:
    """A record for metadata that cannot be read, if it mentions our entry-point group."""
    try:
        with open(os.path.join(location, "entry_points.txt"), "rb") as file:
            if ENTRY_POINT_GROUP.encode() not in file.read():
                return None
    except OSError:
        return None
    folder = os.path.basename(location)
    return PluginRecord(
        name=folder,
        value="",
        distribution=folder,
        version="?",
        location=location,
        state="broken",
        message=f"its metadata cannot be read: {type(error).__name__}: {error}",
    )


def discover(path: Sequence[str] | None = None) -> list[PluginRecord]:
    """Return a record for every installed plugin, sorted by plugin name and distribution.

    One distribution that is found several times (a symlinked folder, a stale ``egg-info`` in the
    working directory) is one plugin: the first on the path counts, as it does for ``import``.

    Args:
        path: Folders to search instead of ``sys.path``.

    Returns:
        Records in state ``available``, ``disabled`` or ``duplicate``.
    """
    found: dict[tuple[str, str], PluginRecord] = {}
    distributions = (
        importlib_metadata.distributions()
        if path is None
        else importlib_metadata.distributions(path=list(path))
    )
    for distribution in distributions:
        location = _location(distribution)
        try:
            entry_points = _entry_points(distribution)
            name = _name(distribution) if entry_points else ""
            version = _version(distribution) if entry_points else ""
        except Exception as error:
            # metadata of anything installed is read here; what cannot be read must not stop us,
            # and is worth a word only if it is a plugin
            broken = _unreadable(location, error)
            if broken is not None:
                found.setdefault((location, broken.name), broken)
            continue
        for ep in entry_points:
            key = (str(canonicalize_name(name)), ep.name)
            known = found.get(key)
            if known is None:
                found[key] = PluginRecord(
                    name=ep.name,
                    value=ep.value,
                    distribution=name,
                    version=version,
                    location=location,
                )
            elif location != known.location and location not in known.also_at:
                known.also_at += (location,)
    records = sorted(found.values(), key=lambda r: (r.name, r.distribution))
    _mark_disabled(records)
    _mark_duplicates(records)
    return records


def _mark_disabled(records: Iterable[PluginRecord]) -> None:
    off = disabled_names()
    for record in records:
        if {canonicalize_name(record.name), canonicalize_name(record.distribution)} & off:
            record.state = "disabled"
            record.message = f"switched off by {DISABLE_VARIABLE}"


def _mark_duplicates(records: Sequence[PluginRecord]) -> None:
    by_name: dict[str, list[PluginRecord]] = {}
    for record in records:
        if record.state == "available":
            by_name.setdefault(record.name, []).append(record)
    for same in by_name.values():
        if len(same) < 2:
            continue
        owners = " and ".join(r.owner for r in same)
        for record in same:
            record.state = "duplicate"
            record.message = (
                f"plugin name {record.name!r} is used by {owners}; uninstall one, or disable one "
                f"with {DISABLE_VARIABLE}={same[0].distribution}"
            )
