"""Installed distributions for tests: real metadata and real modules in a temporary folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path


def write_distribution(
    folder: Path,
    name: str,
    *,
    version: str = "1.0",
    entry_points: str = "",
    modules: Mapping[str, str] | None = None,
    requires: Sequence[str] = (),
    layout: str = "dist-info",
) -> Path:
    """Write a distribution as an installer would leave it.

    Args:
        folder: Folder that is, or will be, on ``sys.path``.
        name: Distribution name.
        version: Its version.
        entry_points: Contents of ``entry_points.txt``.
        modules: Source text by module name.
        requires: Requirement lines.
        layout: ``dist-info``, or ``egg-info`` as a development install leaves it.

    Returns:
        The metadata folder.
    """
    folder.mkdir(parents=True, exist_ok=True)
    stem = name.replace("-", "_")
    if layout == "dist-info":
        metadata, file = folder / f"{stem}-{version}.dist-info", "METADATA"
    else:
        metadata, file = folder / f"{stem}.egg-info", "PKG-INFO"
    metadata.mkdir()
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
    if layout == "dist-info":
        lines += [f"Requires-Dist: {line}" for line in requires]
        lines += [
            f"Provides-Extra: {extra}"
            for extra in sorted(
                {r.split("extra ==")[1].strip(" '\"") for r in requires if "extra ==" in r}
            )
        ]
    (metadata / file).write_text("\n".join(lines) + "\n")
    if entry_points:
        (metadata / "entry_points.txt").write_text(entry_points)
    for module, source in (modules or {}).items():
        (folder / f"{module}.py").write_text(source)
    return metadata
