"""What would change in a model: claims are collected, nothing is changed.

A converter looks at every module of the unchanged model and answers with a ``Replacement``, a
``Skip`` with a reason, or ``None`` if the module is not its business. A replacement is another
class for the same object, so that parameters, buffers, hooks, names and flags stay where they are.
"""

from __future__ import annotations

import abc
import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from torchtitan_npu_core.errors import (
    ClaimConflictError,
    ConversionError,
    ConverterError,
    FactoryError,
    UnmatchedConverterError,
)
from torchtitan_npu_core.limits import violations
from torchtitan_npu_core.registry import Offer
from torchtitan_npu_core.specs import OperatorSpec
from torchtitan_npu_core.swap import replaced_from

RootHook = Callable[..., Any]

CALLS_ATTRIBUTE = "_torchtitan_npu_calls"
OPTIONS_ATTRIBUTE = "_torchtitan_npu_options"


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSizes:
    """Sizes of one forward on one rank.

    Args:
        batch: Sequences per forward.
        seq_len: Tokens per sequence on this rank.
        tensor_parallel: Ranks that share the attention heads.
    """

    batch: int
    seq_len: int
    tensor_parallel: int = 1


Sizes = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Replacement:
    """Turn a module into an instance of another class.

    Args:
        cls: The new class. It must derive from the module's own class.
        attributes: Plain attributes to set on the instance. They must survive ``copy.deepcopy``.
        note: What a reader of the plan should know, e.g. a route taken for some inputs.
        sizes: Function of the job's sizes that returns the quantities of this module's operator
            calls, e.g. ``{"npu::npu_rotary_mul": {"head_dim": 64}}``, to compare with device limits
            before the first call.
        calls: Calls of each operator in one forward of this module.
        keeps_children: False if child modules are no longer called through the module tree; a
            claim on a module below this one is then an error.
    """

    cls: type[nn.Module]
    attributes: Mapping[str, Any] = field(default_factory=dict)
    note: str = ""
    sizes: Callable[[JobSizes], Sizes] | None = None
    calls: Mapping[str, int] = field(default_factory=dict)
    keeps_children: bool = True


@dataclass(frozen=True, slots=True)
class Skip:
    """A module that looks like a target and must not be replaced.

    Args:
        reason: Why, for the plan and the log.
    """

    reason: str


@dataclass(frozen=True, kw_only=True)
class RootSetup:
    """What a converter needs on the model itself, beside its replacements.

    Args:
        attributes: Plain attributes to set on the root module.
        pre_hooks: Module-level functions registered as forward pre-hooks with keyword arguments.
        post_hooks: Module-level functions registered as forward hooks that are always called.
    """

    attributes: Mapping[str, Any] = field(default_factory=dict)
    pre_hooks: tuple[RootHook, ...] = ()
    post_hooks: tuple[RootHook, ...] = ()


class Converter(abc.ABC):
    """Base class of converters. One instance plans and converts one model.

    Args:
        options: Values of the options declared in the converter's spec.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        self.options = dict(options)

    @abc.abstractmethod
    def claim(self, fqn: str, module: nn.Module, model: nn.Module) -> Replacement | Skip | None:
        """Decide what to do with one module. Must not change anything.

        Args:
            fqn: Name of the module in the model, empty for the model itself.
            module: The module, on the meta device or with storage.
            model: The whole model, as it was given.

        Returns:
            A replacement, a refusal with its reason, or None if this module is no target.
        """

    def setup(self, model: nn.Module, replaced: Sequence[str]) -> RootSetup | None:
        """Return what is needed on the root module, if anything was replaced.

        Args:
            model: The whole model.
            replaced: Names of the modules this converter replaces.
        """
        return None


@dataclass(frozen=True, kw_only=True)
class PlanRow:
    """What happens to one module.

    Args:
        converter: Name of the converter.
        fqn: Name of the module.
        also: Other names of the same, shared module.
        state: ``replaced``, ``skipped`` or ``kept`` (already converted).
        module_class: Class before.
        replacement_class: Class after, for state replaced.
        reason: Why it was skipped or kept.
        note: What a reader should know about the replacement.
        calls: Calls of each operator in one forward of this module.
        replacement: The claim itself, for state replaced.
    """

    converter: str
    fqn: str
    also: tuple[str, ...] = ()
    state: str
    module_class: str
    replacement_class: str = ""
    reason: str = ""
    note: str = ""
    calls: Mapping[str, int] = field(default_factory=dict)
    replacement: Replacement | None = field(default=None, repr=False)


@dataclass(kw_only=True)
class ConversionPlan:
    """Everything that would happen to one model.

    Args:
        offers: The requested converters, in the user's order.
        converters: One converter object per offer, by name.
        rows: What happens to which module.
        searched: Number of distinct modules in the model.
        untouched: Names of modules that no converter claimed.
        allow_unmatched: Converters that may match nothing.
    """

    offers: Sequence[Offer]
    converters: Mapping[str, Converter]
    rows: list[PlanRow]
    searched: int
    untouched: list[str]
    allow_unmatched: frozenset[str] = frozenset()

    def rows_of(self, converter: str, state: str | None = None) -> list[PlanRow]:
        """Rows of one converter, optionally of one state."""
        return [r for r in self.rows if r.converter == converter and state in (None, r.state)]

    def operator_calls(self) -> dict[str, int]:
        """Operator calls that one forward of the whole model makes, by operator name."""
        total: dict[str, int] = {}
        for row in self.rows:
            for name, number in row.calls.items():
                total[name] = total.get(name, 0) + number
        return total

    def limit_problems(
        self, family: str, job: JobSizes, specs: Mapping[str, OperatorSpec]
    ) -> list[str]:
        """Say which replacements a device family could not run.

        Args:
            family: Key of ``DEVICE_FAMILIES``.
            job: Sizes of one forward.
            specs: Declared operators, by name.

        Returns:
            One line per distinct problem, with the number of modules it concerns.
        """
        found: dict[tuple[str, str, str], list[str]] = {}
        for row in self.rows:
            if row.replacement is None or row.replacement.sizes is None:
                continue
            for operator, quantities in row.replacement.sizes(job).items():
                if operator in specs:
                    for problem in violations(specs[operator].limits, quantities, family):
                        found.setdefault((row.converter, operator, problem), []).append(row.fqn)
        return [
            f"{converter}: {operator} on {family}: {problem} ({len(fqns)} modules, first {fqns[0]})"
            for (converter, operator, problem), fqns in found.items()
        ]

    def check_matched(self) -> None:
        """Raise if a converter replaces nothing and that was not allowed.

        Raises:
            UnmatchedConverterError: Naming the first such converter.
        """
        for offer in self.offers:
            name = offer.spec.name
            names = {name, *offer.spec.aliases}
            if self.rows_of(name, "replaced") or self.rows_of(name, "kept"):
                continue
            if names & self.allow_unmatched:
                continue
            reasons = [f"{r.fqn}: {r.reason}" for r in self.rows_of(name, "skipped")]
            raise UnmatchedConverterError(name, self.searched, reasons)


def import_factory(offer: Offer) -> Callable[[Mapping[str, Any]], Converter]:
    """Import a converter's implementation.

    Raises:
        FactoryError: If it cannot be imported or is no ``Converter`` subclass.
    """
    spec, owner = offer.spec, offer.plugin.owner
    module_name, _, attribute = spec.factory.partition(":")
    try:
        factory = getattr(importlib.import_module(module_name), attribute)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise FactoryError(spec.name, owner, spec.factory, reason) from error
    if not (isinstance(factory, type) and issubclass(factory, Converter)):
        raise FactoryError(spec.name, owner, spec.factory, "it is not a subclass of Converter")
    return factory


def make_converter(offer: Offer, options: Mapping[str, Any]) -> Converter:
    """Construct a converter with its options, defaults filled in.

    Raises:
        FactoryError: If it cannot be imported.
        ConversionError: If its constructor fails.
    """
    factory = import_factory(offer)
    defaults = {option.name: option.default for option in offer.spec.options}
    try:
        return factory({**defaults, **options})
    except ConverterError:
        raise
    except Exception as error:
        reason = f"its constructor raised {type(error).__name__}: {error}"
        raise ConversionError(offer.spec.name, "", f"{reason} ({offer.plugin.owner})") from error


def plan_conversion(
    model: nn.Module,
    offers: Sequence[Offer],
    options: Mapping[str, Mapping[str, Any]] | None = None,
    allow_unmatched: frozenset[str] = frozenset(),
) -> ConversionPlan:
    """Collect every converter's claims on an unchanged model.

    Args:
        model: On any device; the meta device is fine.
        offers: Requested converters, from ``ConverterRegistry.resolve``.
        options: Option values per converter name.
        allow_unmatched: Converters that may match nothing.

    Raises:
        FactoryError: If a converter's implementation cannot be imported.
        ConversionError: If a converter fails while looking at a module.
        ClaimConflictError: If two converters claim one module, or one inside the other.
    """
    options = options or {}
    converters = {o.spec.name: make_converter(o, options.get(o.spec.name, {})) for o in offers}
    names_of: dict[int, list[str]] = {}
    modules: dict[int, nn.Module] = {}
    for fqn, module in model.named_modules(remove_duplicate=False):
        names_of.setdefault(id(module), []).append(fqn)
        modules[id(module)] = module

    rows: list[PlanRow] = []
    touched: set[int] = set()
    for name, converter in converters.items():
        _check_options(name, converter, model)
        for key, module in modules.items():
            row = _row(name, converter, names_of[key], module, model)
            if row is not None:
                rows.append(row)
                touched.add(key)
    _check_claims(rows)
    return ConversionPlan(
        offers=offers,
        converters=converters,
        rows=rows,
        searched=len(modules),
        untouched=[names_of[key][0] for key in modules if key not in touched],
        allow_unmatched=allow_unmatched,
    )


def _check_options(name: str, converter: Converter, model: nn.Module) -> None:
    """Refuse to pretend that options changed on a model that is already converted."""
    earlier = model.__dict__.get(OPTIONS_ATTRIBUTE, {}).get(name)
    if earlier is not None and earlier != converter.options:
        raise ConversionError(
            name, "", f"it was converted before with options {earlier}, not {converter.options}"
        )


def _row(
    name: str, converter: Converter, fqns: Sequence[str], module: nn.Module, model: nn.Module
) -> PlanRow | None:
    fqn, also = fqns[0], tuple(fqns[1:])
    earlier = replaced_from(module)
    if earlier is not None:
        owner, original = earlier
        if owner != name:
            return None
        return PlanRow(
            converter=name,
            fqn=fqn,
            also=also,
            state="kept",
            module_class=class_path(original),
            replacement_class=class_path(type(module)),
            reason="already converted",
            calls=module.__dict__.get(CALLS_ATTRIBUTE, {}),
        )
    try:
        claim = converter.claim(fqn, module, model)
    except ConverterError:
        raise
    except Exception as error:
        raise ConversionError(name, fqn, f"{type(error).__name__}: {error}") from error
    if claim is None:
        return None
    original = class_path(type(module))
    if isinstance(claim, Skip):
        return PlanRow(
            converter=name,
            fqn=fqn,
            also=also,
            state="skipped",
            module_class=original,
            reason=claim.reason,
        )
    return PlanRow(
        converter=name,
        fqn=fqn,
        also=also,
        state="replaced",
        module_class=original,
        replacement_class=class_path(claim.cls),
        note=claim.note,
        calls=claim.calls,
        replacement=claim,
    )


def class_path(cls: type) -> str:
    """Import path of a class, as plans show it."""
    return f"{cls.__module__}.{cls.__qualname__}"


def _check_claims(rows: Sequence[PlanRow]) -> None:
    claims = {r.fqn: r for r in rows if r.state == "replaced"}
    by_fqn: dict[str, PlanRow] = {}
    for row in rows:
        if row.state != "replaced":
            continue
        other = by_fqn.setdefault(row.fqn, row)
        if other is not row:
            raise ClaimConflictError(
                f"Converters {other.converter!r} and {row.converter!r} both claim {row.fqn}. "
                f"Remove one from the list.",
                row.fqn,
                (other.converter, row.converter),
            )
    for row in claims.values():
        parts = row.fqn.split(".")
        for depth in range(len(parts)):
            above = claims.get(".".join(parts[:depth]))
            if above is None or above is row or above.replacement is None:
                continue
            if not above.replacement.keeps_children:
                raise ClaimConflictError(
                    f"Converter {row.converter!r} claims {row.fqn}, which is inside {above.fqn}, "
                    f"and {above.converter!r} replaces that with something that does not use it. "
                    f"Remove one from the list.",
                    row.fqn,
                    (above.converter, row.converter),
                )
