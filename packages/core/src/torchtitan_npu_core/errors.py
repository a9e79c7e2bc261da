"""Every error this package raises on purpose.

Each says what could not be done, to what, why, and what to do next, and carries the facts as
attributes so that callers need not parse text.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches

OFFICIAL_CONVERTERS: Mapping[str, str] = {
    "npu_rms_norm": "torchtitan-npu-op-norm-rope",
    "npu_rope": "torchtitan-npu-op-norm-rope",
    "npu_permute": "torchtitan-npu-op-moe",
    "npu_gmm": "torchtitan-npu-op-moe",
    "npu_dsa": "torchtitan-npu-op-dsa",
}
"""Converter names this project releases, and the distribution to install for each."""


def toml_list(names: Iterable[str]) -> str:
    """Write names as a TOML list, ready to paste into a config."""
    return "converters = [" + ", ".join(f'"{name}"' for name in names) + "]"


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return `` Did you mean 'x'?`` for close names, or an empty string."""
    close = get_close_matches(name, sorted(known), n=3)
    return f" Did you mean {' or '.join(repr(c) for c in close)}?" if close else ""


class ConverterError(Exception):
    """Base of all errors raised by torchtitan-npu."""


class UnknownConverterError(ConverterError, ValueError):
    """A config names a converter that no usable plugin offers.

    Args:
        name: The name in the config.
        known: Names that could be used.
        problems: One line for each plugin that is installed but cannot be used.
    """

    def __init__(self, name: str, known: Iterable[str], problems: Sequence[str] = ()) -> None:
        self.name = name
        self.known = sorted(known)
        self.problems = tuple(problems)
        offered_by = OFFICIAL_CONVERTERS.get(name)
        if offered_by and not any(offered_by in problem for problem in problems):
            text = (
                f"Unknown converter {name!r}. It is offered by {offered_by}, which is not "
                f"installed:\n  pip install {offered_by}"
            )
        else:
            listed = ", ".join(self.known) or "none"
            text = (
                f"Unknown converter {name!r}.{did_you_mean(name, self.known)} "
                f"Installed converters: {listed}."
            )
        if problems:
            text += "\nInstalled plugins that cannot be used:\n  " + "\n  ".join(problems)
        text += "\nRun 'torchtitan-npu list --all' to see disabled and broken plugins."
        super().__init__(text)


class ConverterListError(ConverterError, ValueError):
    """The list of converters in a config cannot be used as written.

    Args:
        message: What is wrong.
        corrected: The list that would be accepted, if there is one.
    """

    def __init__(self, message: str, corrected: Sequence[str] | None = None) -> None:
        self.corrected = None if corrected is None else list(corrected)
        if self.corrected is not None:
            message = f"{message} Use: {toml_list(self.corrected)}"
        super().__init__(message)


class DuplicateConverterError(ConverterError, ValueError):
    """Two distributions offer a converter of the same name."""

    def __init__(self, name: str, distributions: Sequence[str]) -> None:
        self.name = name
        self.distributions = tuple(distributions)
        first = distributions[0].split()[0]
        super().__init__(
            f"Converter {name!r} is offered by {len(distributions)} distributions: "
            f"{' and '.join(distributions)}. Uninstall one, or disable one with "
            f"TORCHTITAN_NPU_DISABLE_PLUGINS={first}."
        )


class UnknownOptionError(ConverterError, ValueError):
    """The ``[npu]`` section of a config has a key that nothing reads."""

    def __init__(self, section: str, name: str, known: Iterable[str]) -> None:
        self.section = section
        self.name = name
        self.known = sorted(known)
        listed = ", ".join(self.known) or "none"
        super().__init__(
            f"Unknown option {name!r} in [{section}].{did_you_mean(name, self.known)} "
            f"Known options: {listed}."
        )


class OptionValueError(ConverterError, ValueError):
    """An option in the ``[npu]`` section has a value of the wrong type or outside its choices."""

    def __init__(self, section: str, name: str, value: object, expected: str) -> None:
        self.section = section
        self.name = name
        self.value = value
        super().__init__(
            f"Option {name!r} in [{section}] is {value!r}; it must be {expected.rstrip('.')}."
        )


class PluginError(ConverterError):
    """A plugin is installed but cannot be used, and strict loading was asked for."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        super().__init__(
            "Installed plugins that cannot be used:\n  "
            + "\n  ".join(problems)
            + "\nThis is an error because strict loading is on (TORCHTITAN_NPU_STRICT_PLUGINS=1 or "
            "strict = true in [npu]). Run 'torchtitan-npu doctor' for details."
        )


class DeclarationError(ConverterError, TypeError):
    """A plugin's hook returned something that cannot be used."""

    def __init__(self, owner: str, hook: str, reason: str) -> None:
        self.owner = owner
        self.hook = hook
        super().__init__(
            f"Plugin {owner}: {hook} cannot be used: {reason}. Upgrade or uninstall that plugin, "
            f"or disable it with TORCHTITAN_NPU_DISABLE_PLUGINS={owner.split()[0]}."
        )


class PluginSetMismatchError(ConverterError, RuntimeError):
    """Ranks of one job have different plugins installed."""

    def __init__(self, differences: Sequence[str]) -> None:
        self.differences = tuple(differences)
        super().__init__(
            "Ranks of this job have different converter plugins:\n  "
            + "\n  ".join(differences)
            + "\nInstall the same distributions on every node, then start again."
        )


class NameTakenError(ConverterError, RuntimeError):
    """Another package has already registered one of our names with torchtitan."""

    def __init__(self, name: str, owner: str) -> None:
        self.name = name
        self.owner = owner
        super().__init__(
            f"torchtitan already has a model converter named {name!r}, registered by {owner}. "
            f"Two packages cannot offer the same name. Uninstall or stop importing one of them; "
            f"'torchtitan-npu doctor' shows what is installed."
        )


class FactoryError(ConverterError, ImportError):
    """A converter's implementation could not be imported."""

    def __init__(self, name: str, owner: str, factory: str, reason: str) -> None:
        self.name = name
        self.factory = factory
        super().__init__(
            f"Converter {name!r} ({owner}) could not be loaded from {factory!r}: {reason}. "
            f"Reinstall the distribution, or remove {name!r} from the list."
        )


class ClaimConflictError(ConverterError, ValueError):
    """Two converters want to replace the same module, or one inside the other."""

    def __init__(self, message: str, fqn: str, converters: Sequence[str]) -> None:
        self.fqn = fqn
        self.converters = tuple(converters)
        super().__init__(message)


class UnmatchedConverterError(ConverterError, ValueError):
    """A requested converter replaces nothing in this model."""

    def __init__(self, name: str, searched: int, reasons: Sequence[str]) -> None:
        self.name = name
        self.searched = searched
        self.reasons = tuple(reasons)
        if reasons:
            shown = "\n  ".join(reasons[:5])
            more = f"\n  and {len(reasons) - 5} more" if len(reasons) > 5 else ""
            why = f" Modules it looked at and refused:\n  {shown}{more}\n"
        else:
            why = " "
        super().__init__(
            f"Converter {name!r} matched no module in this model (searched {searched} modules)."
            f"{why}Remove it from the list, or list it in allow_unmatched of the [npu] section."
        )


class ConversionError(ConverterError, RuntimeError):
    """One module could not be converted; the model was left as it was."""

    def __init__(self, converter: str, fqn: str, reason: str) -> None:
        self.converter = converter
        self.fqn = fqn
        self.reason = reason
        super().__init__(
            f"Converter {converter!r} could not convert {fqn or 'the model'!r}: {reason}. "
            f"The model was left unchanged."
        )


class DeviceLimitError(ConverterError, ValueError):
    """An operator call is outside what the targeted device family accepts."""

    def __init__(self, operator: str, family: str, violations: Sequence[str]) -> None:
        self.operator = operator
        self.family = family
        self.violations = tuple(violations)
        super().__init__(
            f"{operator} cannot run on device family {family!r}: {'; '.join(violations)}. "
            f"Change the model or batch size, or remove the converter that calls it."
        )


class OperatorArgumentError(ConverterError, ValueError):
    """An operator was called with arguments the device would not accept."""


class OperatorVersionError(ConverterError, RuntimeError):
    """The installed torch_npu has an operator in another form than the converters call it.

    Args:
        operator: Qualified name.
        reason: What does not fit.
        installed: Version of torch_npu.
        fitting: Releases of torch_npu that would fit.
    """

    def __init__(
        self, operator: str, reason: str, installed: str | None, fitting: Sequence[str]
    ) -> None:
        self.operator = operator
        self.reason = reason
        self.installed = installed
        self.fitting = tuple(fitting)
        if fitting:
            advice = f"Releases that fit: {', '.join(fitting)}. Install one that suits your torch"
        else:
            advice = "No release of torch_npu that is known here fits"
        super().__init__(
            f"{operator} cannot be called with torch_npu {installed or '(unknown)'}: {reason}. "
            f"{advice}, or remove the converters that call it."
        )


class NotDifferentiableError(ConverterError, RuntimeError):
    """Backward reached an operator for which the device would silently lose the gradient."""

    def __init__(self, operator: str) -> None:
        self.operator = operator
        super().__init__(
            f"{operator} has no derivative formula, and torch would only warn and leave grad=None. "
            f"Call the differentiable operator built on it, or detach its inputs."
        )


class NoReferenceError(ConverterError, NotImplementedError):
    """A virtual NPU was asked for an operator that nothing here can compute."""

    def __init__(self, operator: str) -> None:
        self.operator = operator
        super().__init__(
            f"{operator} has no kernel on a virtual NPU: it needs a real device, and no installed "
            f"plugin declares a reference kernel for it. Install the plugin that does, or avoid "
            f"the operator."
        )


class CommandError(ConverterError):
    """A command cannot do what was asked; the message is for the person at the terminal."""
