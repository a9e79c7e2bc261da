"""Train configs that ship with the package, found by name."""

from __future__ import annotations

from pathlib import Path

from torchtitan_npu_core.errors import CommandError, did_you_mean


def config_names() -> list[str]:
    """Names of the shipped configs, usable in place of a path."""
    return sorted(path.stem for path in Path(__file__).parent.glob("*.toml"))


def find_config(name_or_path: str) -> Path:
    """Return the file for a path or for the name of a shipped config.

    Raises:
        CommandError: If there is no such file or name.
    """
    path = Path(name_or_path)
    if path.is_file():
        return path
    shipped = Path(__file__).parent / f"{name_or_path}.toml"
    if "/" not in name_or_path and shipped.is_file():
        return shipped
    names = config_names()
    raise CommandError(
        f"There is no config file {name_or_path!r}.{did_you_mean(name_or_path, names)} "
        f"Give a path, or one of the shipped configs: {', '.join(names)}."
    )


def summary(name: str) -> str:
    """First comment line of a shipped config."""
    first = find_config(name).read_text().splitlines()[0]
    return first.removeprefix("#").strip()
