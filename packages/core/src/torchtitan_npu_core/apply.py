"""Carry out a plan: all of a converter's replacements, or none of them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from torchtitan_npu_core.discovery import PluginRecord
from torchtitan_npu_core.errors import ConversionError
from torchtitan_npu_core.loading import PluginSet, discover_and_load, report_problems
from torchtitan_npu_core.operators import register_plugin_operators
from torchtitan_npu_core.plan import (
    CALLS_ATTRIBUTE,
    OPTIONS_ATTRIBUTE,
    ConversionPlan,
    PlanRow,
    plan_conversion,
)
from torchtitan_npu_core.registry import ConverterRegistry
from torchtitan_npu_core.selective import SAVE_ATTRIBUTE, extend_selective_checkpointing

logger = logging.getLogger(__name__)

_MISSING = object()
_HOOKS_ATTRIBUTE = "_torchtitan_npu_hooks"


@dataclass(kw_only=True)
class ConversionResult:
    """What was done to a model.

    Args:
        replaced: Names of replaced modules, per converter.
        skipped: Names and reasons, per converter.
        kept: Names of modules that were converted before, per converter.
        calls_per_forward: Operator calls one forward makes, by operator name.
    """

    replaced: dict[str, list[str]] = field(default_factory=dict)
    skipped: dict[str, list[tuple[str, str]]] = field(default_factory=dict)
    kept: dict[str, list[str]] = field(default_factory=dict)
    calls_per_forward: dict[str, int] = field(default_factory=dict)

    @property
    def num_replaced(self) -> int:
        """Replaced module instances over all converters."""
        return sum(len(fqns) for fqns in self.replaced.values())


def apply_converter(
    model: nn.Module,
    plan: ConversionPlan,
    name: str,
    save: Sequence[str] = (),
    undo: list[Callable[[], None]] | None = None,
) -> None:
    """Carry out the part of a plan that belongs to one converter.

    Args:
        model: The model the plan was made for.
        plan: The plan.
        name: Name of the converter.
        save: Operators whose outputs selective activation checkpointing should keep.
        undo: Steps that take back earlier converters of the same list; this one's are added.

    Raises:
        ConversionError: Naming the module; the model is as it was before the whole list.
    """
    undo = [] if undo is None else undo
    row: PlanRow | None = None
    try:
        rows = plan.rows_of(name, "replaced")
        for row in rows:
            _replace(model.get_submodule(row.fqn), row, undo)
        row = None
        if rows:
            options = {**model.__dict__.get(OPTIONS_ATTRIBUTE, {})}
            options[name] = plan.converters[name].options
            _set_attribute(model, OPTIONS_ATTRIBUTE, options, undo)
            setup = plan.converters[name].setup(model, [r.fqn for r in rows])
            if setup is not None:
                for key, value in setup.attributes.items():
                    _set_attribute(model, key, value, undo)
                for hook in setup.pre_hooks:
                    _add_hook(model, hook, undo, before=True)
                for hook in setup.post_hooks:
                    _add_hook(model, hook, undo, before=False)
            if save:
                known = getattr(model, SAVE_ATTRIBUTE, ())
                _set_attribute(model, SAVE_ATTRIBUTE, tuple(sorted({*known, *save})), undo)
                _add_hook(model, extend_selective_checkpointing, undo, before=True)
    except BaseException as error:
        while undo:
            undo.pop()()
        if isinstance(error, Exception) and not isinstance(error, ConversionError):
            where = row.fqn if row is not None else ""
            raise ConversionError(name, where, f"{type(error).__name__}: {error}") from error
        raise


def _replace(module: nn.Module, row: PlanRow, undo: list[Callable[[], None]]) -> None:
    assert row.replacement is not None
    old, new = module.__class__, row.replacement.cls
    if not issubclass(new, old):
        raise TypeError(f"{new.__name__} does not derive from {old.__name__}")
    for key, value in row.replacement.attributes.items():
        _set_attribute(module, key, value, undo)
    _set_attribute(module, CALLS_ATTRIBUTE, dict(row.replacement.calls), undo)
    module.__class__ = new
    undo.append(lambda: setattr(module, "__class__", old))


def _set_attribute(module: nn.Module, key: str, value: Any, undo: list[Callable[[], None]]) -> None:
    # plain attributes only: a module or parameter here would change the model's state dict
    if isinstance(value, nn.Module | nn.Parameter):
        raise TypeError(f"attribute {key!r} is a {type(value).__name__}, expected a plain object")
    before = module.__dict__.get(key, _MISSING)
    object.__setattr__(module, key, value)

    def restore() -> None:
        if before is _MISSING:
            module.__dict__.pop(key, None)
        else:
            object.__setattr__(module, key, before)

    undo.append(restore)


def _add_hook(
    model: nn.Module, hook: Callable[..., Any], undo: list[Callable[[], None]], *, before: bool
) -> None:
    """Register a root hook once; a second conversion of the same model adds nothing."""
    registered = model.__dict__.get(_HOOKS_ATTRIBUTE, ())
    if hook in registered:
        return
    if before:
        handle = model.register_forward_pre_hook(hook, with_kwargs=True)
    else:
        handle = model.register_forward_hook(hook, with_kwargs=True, always_call=True)
    undo.append(handle.remove)
    _set_attribute(model, _HOOKS_ATTRIBUTE, (*registered, hook), undo)


def add_root_hook(model: nn.Module, hook: Callable[..., Any]) -> None:
    """Register a forward pre-hook on the model itself, once.

    Args:
        model: The whole model.
        hook: A module-level function of ``(module, args, kwargs)``.
    """
    _add_hook(model, hook, [], before=True)


def apply_plan(model: nn.Module, plan: ConversionPlan, plugins: PluginSet) -> ConversionResult:
    """Carry out a whole plan, one converter after the other in the user's order.

    Raises:
        UnmatchedConverterError: If a converter would replace nothing; nothing is changed.
        ConversionError: If a module cannot be converted; nothing is changed.
    """
    plan.check_matched()
    prepare(plan, plugins)
    undo: list[Callable[[], None]] = []
    for offer in plan.offers:
        save = save_operators(plugins, offer.plugin)
        apply_converter(model, plan, offer.spec.name, save, undo)
    return finish(plan, plugins)


def prepare(plan: ConversionPlan, plugins: PluginSet) -> None:
    """Do what precedes the first replacement: register operators, tell observers."""
    plan.operator_calls()  # a plugin's counts that do not add up are an error now, not afterwards
    for offer in plan.offers:
        register_plugin_operators(plugins, offer.plugin, offer.spec.operators)
    notify(plugins, "torchtitan_npu_before_conversion", plan=plan)


def save_operators(plugins: PluginSet, record: PluginRecord) -> list[str]:
    """Operators whose outputs one plugin wants kept by selective activation checkpointing."""
    returned = plugins.call(record, "torchtitan_npu_selective_save_operators")
    return sorted({name for names in returned for name in names})


def finish(plan: ConversionPlan, plugins: PluginSet) -> ConversionResult:
    """Do what follows the last replacement: collect the result, log it, tell observers."""
    result = ConversionResult(calls_per_forward=plan.operator_calls())
    for offer in plan.offers:
        name = offer.spec.name
        result.replaced[name] = [r.fqn for r in plan.rows_of(name, "replaced")]
        result.skipped[name] = [(r.fqn, r.reason) for r in plan.rows_of(name, "skipped")]
        result.kept[name] = [r.fqn for r in plan.rows_of(name, "kept")]
    notify(plugins, "torchtitan_npu_after_conversion", plan=plan, result=result)
    return result


def notify(plugins: PluginSet, hook: str, **kwargs: Any) -> None:
    """Tell every loaded plugin; one that raises is named in a warning and changes nothing."""
    for record in plugins.loaded:
        try:
            plugins.call(record, hook, **kwargs)
        except Exception as error:
            logger.warning(
                "[converter] plugin %r (%s) raised in %s and was ignored: %s: %s",
                record.name,
                record.owner,
                hook,
                type(error).__name__,
                error,
            )


def convert_model(
    model: nn.Module,
    converters: Sequence[str],
    *,
    section: Mapping[str, Any] | None = None,
    plugins: PluginSet | None = None,
) -> ConversionResult:
    """Convert one model in place, outside any trainer.

    Args:
        model: The model; only this object is changed.
        converters: Converter names, in order.
        section: Contents of an ``[npu]`` section.
        plugins: Loaded plugins; by default all that are installed.

    Returns:
        What was done.

    Raises:
        ConverterError: One of its subclasses, before anything is changed.
    """
    plugins = discover_and_load() if plugins is None else plugins
    registry = ConverterRegistry(plugins)
    settings = registry.settings(section)
    report_problems(plugins, settings.strict)
    offers = registry.resolve(converters)
    plan = plan_conversion(model, offers, settings.options, settings.allow_unmatched)
    return apply_plan(model, plan, plugins)
