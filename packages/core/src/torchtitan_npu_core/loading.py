"""Import plugin modules one by one, verify their hooks, keep failures as records."""

from __future__ import annotations

import hashlib
import importlib
import inspect
import logging
import os
import re
import traceback
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from types import ModuleType
from typing import Any

import pluggy

from torchtitan_npu_core import hookspecs
from torchtitan_npu_core.compat import incompatibility
from torchtitan_npu_core.discovery import PluginRecord, discover
from torchtitan_npu_core.errors import DeclarationError, PluginError
from torchtitan_npu_core.hookspecs import PROJECT
from torchtitan_npu_core.schemas import calls_misfit
from torchtitan_npu_core.specs import ConverterSpec, OperatorSpec, OptionSpec

logger = logging.getLogger(__name__)

STRICT_VARIABLE = "TORCHTITAN_NPU_STRICT_PLUGINS"
_NAME = re.compile(r"[a-z][a-z0-9_.-]*")
_HOOK_PREFIX = "torchtitan_npu_"
_HOOK_NAMES = frozenset(name for name in vars(hookspecs) if name.startswith(_HOOK_PREFIX))


@dataclass(slots=True)
class PluginSet:
    """All installed plugins after loading.

    Args:
        records: One per installed plugin, in a fixed order.
        manager: Holds the modules of loaded plugins.
    """

    records: list[PluginRecord]
    manager: pluggy.PluginManager = field(repr=False)

    @property
    def loaded(self) -> list[PluginRecord]:
        """Plugins that can be used."""
        return [r for r in self.records if r.state == "loaded"]

    @property
    def problems(self) -> list[str]:
        """One line per plugin that is installed but not usable, disabled ones aside."""
        return [r.problem for r in self.records if r.state not in ("loaded", "disabled")]

    @property
    def identity(self) -> list[str]:
        """What two nodes must have in common: name, distribution, version and state."""
        return [f"{r.name} ({r.owner}) {r.state}" for r in self.records]

    @property
    def digest(self) -> str:
        """Short digest of ``identity``; equal on two nodes with the same plugins."""
        return hashlib.sha256("\n".join(self.identity).encode()).hexdigest()[:6]

    def call(self, record: PluginRecord, hook: str, **kwargs: Any) -> list[Any]:
        """Call one hook of one plugin; a list with its result, empty if it has no such hook."""
        others = [p for p in self.manager.get_plugins() if p is not record.module]
        return self.manager.subset_hook_caller(hook, others)(**kwargs)


def strict_from_environment() -> bool:
    """Whether an unusable plugin that nobody asked for is an error."""
    return os.environ.get(STRICT_VARIABLE, "").strip().lower() in ("1", "true", "yes", "on")


def new_manager() -> pluggy.PluginManager:
    """A plugin manager that knows this package's hooks and no plugin."""
    manager = pluggy.PluginManager(PROJECT)
    manager.add_hookspecs(hookspecs)
    return manager


def load(records: Sequence[PluginRecord]) -> PluginSet:
    """Check and import every available plugin.

    Each plugin goes through the steps alone: whatever one of them raises becomes its record's
    state, and the others are not affected.

    Args:
        records: From ``discover()``. They are updated in place.
    """
    plugins = PluginSet(list(records), new_manager())
    for record in plugins.records:
        if record.state == "available":
            _load_one(record, plugins.manager)
    return plugins


def discover_and_load(path: Sequence[str] | None = None) -> PluginSet:
    """Find, check and import every installed plugin."""
    return load(discover(path))


def declared_operators(plugins: PluginSet, record: PluginRecord) -> list[OperatorSpec]:
    """Operators one plugin declares, checked to be declarations.

    Raises:
        DeclarationError: If the hook fails, or returns what is no usable declaration.
    """
    hook = "torchtitan_npu_operators"
    try:
        specs = [spec for returned in plugins.call(record, hook) for spec in returned]
    except Exception as error:
        raise DeclarationError(record.owner, hook, f"{type(error).__name__}: {error}") from error
    for spec in specs:
        if not isinstance(spec, OperatorSpec):
            what = f"it returned a {type(spec).__name__}, expected OperatorSpec"
            raise DeclarationError(record.owner, hook, what)
        try:
            wrong = calls_misfit(spec, spec.schema)
        except ValueError as error:
            wrong = str(error)
        if wrong:
            raise DeclarationError(record.owner, hook, f"{spec.name}: {wrong}")
    return specs


def _load_one(record: PluginRecord, manager: pluggy.PluginManager) -> None:
    reason = incompatibility(record.distribution)
    if reason:
        record.state, record.message = "incompatible", reason
        return
    try:
        module = _import(record.value)
        _check_hook_names(module)
        record.converters = _read_converters(module)
        manager.register(module, name=f"{record.name}:{record.distribution}")
    except KeyboardInterrupt:
        raise
    # SystemExit too: a plugin that exits when imported must not end the process
    except (Exception, SystemExit) as error:
        record.state = "broken"
        record.converters = ()
        record.message = _summary(error, record.value)
        record.traceback = "".join(traceback.format_exception(error))
        return
    record.module = module
    record.state = "loaded"


def _import(value: str) -> Any:
    module_name, _, attribute = value.partition(":")
    module: Any = importlib.import_module(module_name.strip())
    # an entry point may carry extras: 'package.module:attr [extra]'
    for part in attribute.split("[")[0].strip().split("."):
        if part:
            module = getattr(module, part)
    return module


def _implementations(module: ModuleType) -> Iterator[tuple[str, Any, dict[str, Any] | None]]:
    for name in dir(module):
        value = inspect.getattr_static(module, name)
        marker = getattr(value, f"{PROJECT}_impl", None)
        if inspect.isroutine(value) and (marker is not None or name.startswith(_HOOK_PREFIX)):
            yield name, value, marker


def _check_hook_names(module: ModuleType) -> None:
    seen = False
    for name, _, marker in _implementations(module):
        seen = True
        if marker is None:
            raise TypeError(
                f"function {name!r} is named like a hook but has no @hookimpl; add it, or rename "
                f"the function"
            )
        hook = marker.get("specname") or name
        if hook not in _HOOK_NAMES and not marker.get("optionalhook"):
            close = get_close_matches(hook, _HOOK_NAMES, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise TypeError(f"{hook!r} is not a hook of {PROJECT}{hint}")
    if not seen:
        raise TypeError("it implements no hook; mark functions with torchtitan_npu_core.hookimpl")


def _read_converters(module: ModuleType) -> tuple[ConverterSpec, ...]:
    # a manager of its own, so that a bad signature or return value leaves no trace in the real one
    manager = new_manager()
    manager.register(module)
    specs: list[ConverterSpec] = []
    for returned in manager.hook.torchtitan_npu_converters():
        if isinstance(returned, ConverterSpec) or not isinstance(returned, Iterable):
            raise TypeError(
                f"torchtitan_npu_converters must return a list of ConverterSpec, "
                f"not {type(returned).__name__}"
            )
        for spec in returned:
            if not isinstance(spec, ConverterSpec):
                raise TypeError(
                    f"torchtitan_npu_converters returned a {type(spec).__name__} in its list, "
                    f"expected ConverterSpec"
                )
            _check_spec(spec)
            specs.append(spec)
    names = [n for spec in specs for n in (spec.name, *spec.aliases)]
    repeated = sorted({n for n in names if names.count(n) > 1})
    if repeated:
        raise ValueError(f"it offers the name {repeated[0]!r} more than once")
    return tuple(specs)


_RESERVED = frozenset({"allow_unmatched", "strict", "target"})


def _check_spec(spec: ConverterSpec) -> None:
    """Refuse a declaration whose fields are not what they are declared to be."""

    def require(holds: bool, what: str) -> None:
        if not holds:
            raise TypeError(f"converter {spec.name!r}: {what}")

    names = ("replaces", "operators", "requires", "after", "conflicts", "aliases")
    require(isinstance(spec.name, str), "name must be a string")
    for field_name in names:
        value = getattr(spec, field_name)
        strings = isinstance(value, tuple | list) and all(isinstance(v, str) for v in value)
        require(strings, f"{field_name} must be a tuple of strings")
    for name in (spec.name, *spec.aliases):
        require(bool(_NAME.fullmatch(name)), f"{name!r} is no lower-case name")
        require(name not in _RESERVED, f"{name!r} is a key of the [npu] section")
    require(isinstance(spec.summary, str), "summary must be a string")
    factory = spec.factory
    require(isinstance(factory, str) and factory.count(":") == 1, "factory must be 'module:Class'")
    require(spec.name not in (*spec.requires, *spec.after, *spec.conflicts), "it names itself")
    require(isinstance(spec.options, tuple | list), "options must be a tuple")
    for option in spec.options:
        require(isinstance(option, OptionSpec), "options must hold OptionSpec")


def _summary(error: BaseException, value: str) -> str:
    """Exception type, message, and the last frame inside the plugin."""
    text = f"could not be imported: {type(error).__name__}: {error}"
    package = value.partition(":")[0].split(".")[0]
    frames = [
        f
        for f in traceback.extract_tb(error.__traceback__)
        if f"{os.sep}{package}{os.sep}" in f.filename or f.filename.endswith(f"{package}.py")
    ]
    if frames:
        text += f" (at {os.path.basename(frames[-1].filename)}:{frames[-1].lineno})"
    return text


def report_problems(plugins: PluginSet, strict: bool | None = None) -> None:
    """Warn once about each plugin that is installed but not usable, or raise when strict.

    Args:
        plugins: From ``discover_and_load()``.
        strict: Overrides ``TORCHTITAN_NPU_STRICT_PLUGINS``.

    Raises:
        PluginError: If strict and at least one plugin is unusable.
    """
    strict = strict_from_environment() if strict is None else strict
    if strict and plugins.problems:
        raise PluginError(plugins.problems)
    for problem in plugins.problems:
        logger.warning("[converter] %s", problem)
