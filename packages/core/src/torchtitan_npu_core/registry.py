"""Converter names: who offers them, aliases, and the checks on the list a user wrote."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torchtitan_npu_core.discovery import PluginRecord
from torchtitan_npu_core.errors import (
    ConverterListError,
    DuplicateConverterError,
    OptionValueError,
    UnknownConverterError,
    UnknownOptionError,
    did_you_mean,
)
from torchtitan_npu_core.loading import PluginSet
from torchtitan_npu_core.specs import ConverterSpec

logger = logging.getLogger(__name__)

SECTION = "npu"
"""Name of the optional section of the job's TOML."""


@dataclass(frozen=True, slots=True)
class Offer:
    """One converter together with the plugin that offers it."""

    spec: ConverterSpec
    plugin: PluginRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The ``[npu]`` section of a job's TOML, checked.

    Args:
        allow_unmatched: Converter names that may match nothing in the model.
        strict: Make an unusable plugin an error even if nobody asked for it.
        target: Device family whose limits are enforced, or empty for none.
        options: Values per converter name, defaults filled in.
    """

    allow_unmatched: frozenset[str] = frozenset()
    strict: bool | None = None
    target: str = ""
    options: Mapping[str, Mapping[str, Any]]


class ConverterRegistry:
    """Names of all converters that loaded plugins offer.

    Args:
        plugins: The loaded plugins.
    """

    def __init__(self, plugins: PluginSet) -> None:
        self.plugins = plugins
        self._offers: dict[str, list[Offer]] = {}
        for record in plugins.loaded:
            for spec in record.converters:
                for name in (spec.name, *spec.aliases):
                    self._offers.setdefault(name, []).append(Offer(spec, record))

    @property
    def names(self) -> list[str]:
        """Every name a config may use, aliases included, sorted."""
        return sorted(self._offers)

    def offers(self) -> list[Offer]:
        """Every converter once, sorted by name and distribution."""
        seen = {(o.spec.name, o.plugin.distribution): o for os in self._offers.values() for o in os}
        return [seen[key] for key in sorted(seen)]

    def get(self, name: str) -> Offer:
        """Return the converter of this name or alias.

        Raises:
            UnknownConverterError: If no loaded plugin offers it.
            DuplicateConverterError: If more than one does.
        """
        offers = self._offers.get(name)
        if not offers:
            unusable = [r.problem for r in self.plugins.records if r.state != "loaded"]
            raise UnknownConverterError(name, self._offers, unusable)
        if len(offers) > 1:
            raise DuplicateConverterError(name, [o.plugin.owner for o in offers])
        return offers[0]

    def resolve(self, names: Sequence[str]) -> list[Offer]:
        """Check the list a user wrote and return its converters in that order.

        Names that do not belong to a plugin of ours are the caller's to filter out beforehand.

        Raises:
            ConverterListError: If the list is no list, repeats a name or breaks a declared
                ``requires``, ``after`` or ``conflicts``.
            UnknownConverterError: If a name is not offered.
            DuplicateConverterError: If a name is offered twice.
        """
        check_is_list(names)
        offers = [self.get(name) for name in names]
        for name, offer in zip(names, offers, strict=True):
            if name != offer.spec.name:
                logger.info("[converter] %s is the old name of %s", name, offer.spec.name)
        specs = [offer.spec for offer in offers]
        _check_repeats(specs)
        _check_conflicts(specs)
        _check_order(specs, self)
        return offers

    def settings(self, section: Mapping[str, Any] | None) -> Settings:
        """Check the ``[npu]`` section and fill in defaults.

        Raises:
            UnknownOptionError: If a key is not known.
            OptionValueError: If a value has the wrong type or is not one of the choices.
        """
        settings = read_settings(section or {}, [offer.spec for offer in self.offers()])
        for name in sorted(settings.allow_unmatched):
            if name not in self._offers:
                known = f"the name of an installed converter.{did_you_mean(name, self._offers)}"
                raise OptionValueError(SECTION, "allow_unmatched", name, known)
        return settings


def check_is_list(names: Any) -> None:
    """Refuse a string where a list belongs: iterating it would give single letters."""
    if isinstance(names, str):
        corrected = [word.strip() for word in names.split(",") if word.strip()]
        raise ConverterListError(
            f"model.converters is the text {names!r}, it must be a list.", corrected
        )
    if not isinstance(names, list | tuple) or not all(isinstance(n, str) for n in names):
        raise ConverterListError(
            f"model.converters is {names!r}, it must be a list of names in quotes."
        )
    if "" in names:
        raise ConverterListError(
            "model.converters has an empty name in it.", [name for name in names if name]
        )


def _check_repeats(specs: Sequence[ConverterSpec]) -> None:
    names = [spec.name for spec in specs]
    for name in names:
        if names.count(name) > 1:
            raise ConverterListError(
                f"Converter {name!r} is listed more than once.", list(dict.fromkeys(names))
            )


def _check_conflicts(specs: Sequence[ConverterSpec]) -> None:
    names = [spec.name for spec in specs]
    for spec in specs:
        for other in spec.conflicts:
            if other in names:
                raise ConverterListError(
                    f"Converters {spec.name!r} and {other!r} cannot be used together.",
                    [name for name in names if name != other],
                )


def _check_order(specs: Sequence[ConverterSpec], registry: ConverterRegistry) -> None:
    names = [spec.name for spec in specs]
    for position, spec in enumerate(specs):
        earlier = names[:position]
        for needed in spec.requires:
            if needed not in names:
                # say it now if the name cannot be had at all
                registry.get(needed)
                corrected = [*earlier, needed, *names[position:]]
                raise ConverterListError(f"Converter {spec.name!r} requires {needed!r}.", corrected)
        for before in (*spec.requires, *spec.after):
            if before in names and before not in earlier:
                moved = [name for name in names if name != before]
                moved.insert(moved.index(spec.name), before)
                raise ConverterListError(
                    f"Converter {spec.name!r} must come after {before!r}.", moved
                )


def read_settings(section: Mapping[str, Any], specs: Iterable[ConverterSpec]) -> Settings:
    """Check a raw ``[npu]`` section against the options that converters declare."""
    by_name = {spec.name: spec for spec in specs}
    known = {"allow_unmatched", "strict", "target", *by_name}
    for key in section:
        if key not in known:
            raise UnknownOptionError(SECTION, key, known)
    allow = section.get("allow_unmatched", [])
    if not isinstance(allow, list | tuple) or not all(isinstance(n, str) for n in allow):
        raise OptionValueError(SECTION, "allow_unmatched", allow, "a list of converter names")
    strict = section.get("strict")
    if strict is not None and not isinstance(strict, bool):
        raise OptionValueError(SECTION, "strict", strict, "true or false")
    return Settings(
        allow_unmatched=frozenset(allow),
        strict=strict,
        target=_read_target(section.get("target", "")),
        options={
            name: _read_options(name, spec, section.get(name, {})) for name, spec in by_name.items()
        },
    )


def _read_target(value: Any) -> str:
    from torchtitan_npu_core.specs import DEVICE_FAMILIES

    if value not in ("", *DEVICE_FAMILIES):
        families = ", ".join(repr(f) for f in DEVICE_FAMILIES)
        raise OptionValueError(SECTION, "target", value, f"one of {families}")
    return value


def _read_options(name: str, spec: ConverterSpec, given: Any) -> dict[str, Any]:
    where = f"{SECTION}.{name}"
    if not isinstance(given, Mapping):
        raise OptionValueError(SECTION, name, given, f"a table, as in [{where}]")
    declared = {option.name: option for option in spec.options}
    for key in given:
        if key not in declared:
            raise UnknownOptionError(where, key, declared)
    values = {}
    for key, option in declared.items():
        value = given.get(key, option.default)
        kind = type(option.default)
        if kind is float and type(value) is int:
            value = float(value)
        # bool is an int in Python, but 'true' is no number to a person
        if not isinstance(value, kind) or isinstance(value, bool) is not (kind is bool):
            raise OptionValueError(where, key, value, f"of type {kind.__name__}")
        if option.choices and value not in option.choices:
            listed = ", ".join(repr(c) for c in option.choices)
            raise OptionValueError(where, key, value, f"one of {listed}")
        values[key] = value
    return values
