"""Train configs that ship with the package, found by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torchtitan_npu_core.errors import CommandError, did_you_mean


def config_names() -> list[str]:
    """Names of the shipped configs, usable in place of a path."""
    return sorted(path.stem for path in Path(__file__).parent.glob("*.toml"))


def find_config(name_or_path: str) -> Path:
    """Return the file for the name of a shipped config, or for a path.

    Raises:
        CommandError: If there is no such file or name.
    """
    # the name first: a folder may hold a file of that name, as this project's own root does
    shipped = Path(__file__).parent / f"{name_or_path}.toml"
    if Path(name_or_path).name == name_or_path and shipped.is_file():
        return shipped
    path = Path(name_or_path)
    if path.is_file():
        return path
    names = config_names()
    raise CommandError(
        f"There is no config file {name_or_path!r}.{did_you_mean(name_or_path, names)} "
        f"Give a path, or one of the shipped configs: {', '.join(names)}."
    )


def summary(name: str) -> str:
    """First comment line of a shipped config."""
    first = find_config(name).read_text().splitlines()[0]
    return first.removeprefix("#").strip()


def read_toml(path: Path) -> dict[str, Any]:
    """Contents of a TOML file.

    Raises:
        CommandError: If it cannot be read.
    """
    # not at the top: listing configs needs no parser
    import tomlkit
    import tomlkit.exceptions

    try:
        return tomlkit.parse(path.read_text(encoding="utf-8-sig")).unwrap()
    except (OSError, UnicodeDecodeError, tomlkit.exceptions.ParseError) as error:
        raise CommandError(f"Config {path} cannot be read: {error}") from error


def setting(config: dict[str, Any], options: tuple[str, ...], name: str, default: Any) -> Any:
    """Value of ``section.key`` as the trainer sees it: command line, then TOML, then default."""
    section, key = name.split(".")
    table = config.get(section, {})
    if not isinstance(table, dict):
        raise CommandError(f"[{section}] in the config is {table!r}, it must be a table.")
    value = table.get(key, default)
    names = (f"--{name}", f"--{name.replace('_', '-')}")
    for i, option in enumerate(options):
        given, equals, text = option.partition("=")
        if given in names:
            value = text if equals else (options[i + 1] if i + 1 < len(options) else value)
    return value


def check_config(path: Path, options: tuple[str, ...]) -> None:
    """Refuse what the host would refuse without saying how to mend it.

    Raises:
        CommandError: If the file cannot be read, or has an ``[npu]`` section that nothing reads.
    """
    config = read_toml(path)
    if "npu" in config and not setting(config, options, "job.custom_config_module", ""):
        raise CommandError(
            f"Config {path} has an [npu] section, which torchtitan knows only with\n"
            f'  [job]\n  custom_config_module = "torchtitan_npu_core.titan_config"'
        )
