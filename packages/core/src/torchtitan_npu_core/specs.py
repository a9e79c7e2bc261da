"""Declarations a plugin returns from its hooks. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

DEVICE_FAMILIES = {
    "a2": "Atlas A2 (Ascend 910B)",
    "a3": "Atlas A3 (Ascend 910_93)",
    "950": "Ascend 950PR / 950DT",
}
"""Device families that limits are given for, with the products they stand for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptionSpec:
    """One option of a converter, set in the ``[npu.<converter>]`` section of the job's TOML.

    Args:
        name: Key in the section, lower case.
        default: Value used when the key is absent. Its type is the type the option must have.
        summary: One line shown by ``torchtitan-npu explain``.
        choices: Values allowed. Empty means any value of the right type.
    """

    name: str
    default: Any
    summary: str
    choices: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ConverterSpec:
    """One converter a plugin offers.

    Args:
        name: Unique lower-case name users put in their config, e.g. ``"npu_rope"``.
        summary: One line shown by ``torchtitan-npu list``.
        replaces: What this converter may replace: import paths of module classes, or a sentence
            that states the contract it looks for.
        factory: ``"package.module:Class"``, a subclass of ``torchtitan_npu_core.plan.Converter``.
            Imported only when the converter is used.
        operators: Names of the operators its replacements call, e.g. ``"npu::npu_rms_norm"``.
        options: Options the user may set for this converter.
        requires: Names that must be listed, earlier, whenever this one is.
        after: Names that must come earlier in the user's list if they are listed at all.
        conflicts: Names that cannot be listed together with this one.
        aliases: Old names that still select this converter.
    """

    name: str
    summary: str
    replaces: tuple[str, ...]
    factory: str
    operators: tuple[str, ...] = ()
    options: tuple[OptionSpec, ...] = ()
    requires: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    conflicts: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceLimit:
    """What a device family accepts of one quantity of an operator call.

    A quantity is a number that the operator's ``measure`` function computes from the arguments,
    e.g. ``head_dim``. A limit is an error when the job targets one of its families and a warning
    otherwise.

    Args:
        quantity: Name of the quantity.
        families: Keys of ``DEVICE_FAMILIES``.
        maximum: Largest value accepted.
        minimum: Smallest value accepted.
        multiple_of: The value must be a multiple of this.
        choices: The only values accepted.
        reason: Source of the limit, or what happens beyond it.
    """

    quantity: str
    families: tuple[str, ...]
    maximum: int | None = None
    minimum: int | None = None
    multiple_of: int | None = None
    choices: tuple[Any, ...] = ()
    reason: str = ""

    def violation(self, value: Any) -> str | None:
        """Say what is wrong with ``value``, or ``None`` if it is within the limit."""
        if self.choices and value not in self.choices:
            return f"must be one of {', '.join(map(str, self.choices))}"
        if self.maximum is not None and value > self.maximum:
            return f"must be at most {self.maximum}"
        if self.minimum is not None and value < self.minimum:
            return f"must be at least {self.minimum}"
        if self.multiple_of is not None and value % self.multiple_of:
            return f"must be a multiple of {self.multiple_of}"
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownIssue:
    """A fault of some releases of the device library.

    Args:
        generations: Generations of ``torchtitan_npu_core.schemas`` that have it.
        text: What goes wrong, and what to do.
    """

    generations: tuple[str, ...]
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorSpec:
    """One operator a plugin offers where the device library does not.

    Args:
        name: Qualified name, ``"namespace::operator"``.
        schema: The dispatcher schema without the namespace. For operators of the ``npu`` namespace
            it is the schema of torch_npu, letter by letter.
        kernels: ``"package.module:NAME"`` of an ``OperatorKernels`` object. Imported only when the
            operator is needed.
        limits: What device families accept.
        source: Where the operator is documented.
        calls: How converters call it: names of the arguments given, in order, separated by
            commas, those given by name after a ``*``. Other releases of the device library are
            usable where every call fits their schema. Empty: all arguments are given.
        known_issues: Faults of releases that fit.
    """

    name: str
    schema: str
    kernels: str
    limits: tuple[DeviceLimit, ...] = ()
    source: str = ""
    calls: tuple[str, ...] = ()
    known_issues: tuple[KnownIssue, ...] = ()
