"""What torch_npu's operators look like, release by release. Standard library only.

The schemas were read from the libraries in torch_npu's wheels. Releases with equal schemas are one
generation; torch's version does not tell which, since post releases of old versions follow new
schemas. A live schema always decides; this data answers where torch_npu does not run.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torchtitan_npu_core.specs import OperatorSpec


@dataclass(frozen=True, slots=True)
class Argument:
    """One argument of an operator.

    Args:
        name: Its name.
        type: Its type as in the schema, e.g. ``"Tensor?"``.
        default: Its default, written the same for equal values, or None if it must be given.
        keyword_only: Whether it can only be given by name.
    """

    name: str
    type: str
    default: str | None
    keyword_only: bool


@dataclass(frozen=True, slots=True)
class Schema:
    """A dispatcher schema.

    Args:
        name: Name of the operator, without namespace, with overload.
        arguments: In order.
        returns: Type of each output.
    """

    name: str
    arguments: tuple[Argument, ...]
    returns: tuple[str, ...]

    def argument(self, name: str) -> Argument | None:
        """The argument of a name, or None."""
        return next((a for a in self.arguments if a.name == name), None)


@dataclass(frozen=True, slots=True)
class Generation:
    """Releases of torch_npu with equal operators.

    Args:
        name: A letter; later ones are newer.
        versions: The releases, oldest first.
        schemas: Text of each schema by the operator's name, without namespace.
    """

    name: str
    versions: tuple[str, ...]
    schemas: dict[str, str]


_FORM = re.compile(r"(?:[\w]+::)?([\w.]+)\((.*)\) -> (.+)")
_ARGUMENT = re.compile(r"(\S.*?) (\w+)(?:=(.*))?")


def parse_schema(text: str) -> Schema:
    """Read a dispatcher schema, with or without namespace.

    Raises:
        ValueError: If it is none.
    """
    form = _FORM.fullmatch(text.strip())
    if form is None:
        raise ValueError(f"not a schema: {text!r}")
    name, inside, outputs = form.groups()
    arguments, keyword_only = [], False
    for part in _split(inside):
        if part == "*":
            keyword_only = True
            continue
        found = _ARGUMENT.fullmatch(part)
        if found is None:
            raise ValueError(f"not an argument: {part!r} in {text!r}")
        kind, argument, default = found.groups()
        arguments.append(Argument(argument, kind, _value(default), keyword_only))
    if outputs.startswith("(") and outputs.endswith(")"):
        outputs = outputs[1:-1]
    # outputs may be named
    returns = tuple(part.partition(" ")[0] for part in _split(outputs))
    return Schema(name, tuple(arguments), returns)


def _split(text: str) -> Iterator[str]:
    """Parts between the commas that are not in brackets or quotes."""
    depth, quote, part = 0, "", ""
    for letter in text:
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "\"'":
            quote = letter
        elif letter in "([":
            depth += 1
        elif letter in ")]":
            depth -= 1
        if letter == "," and not depth and not quote:
            yield part.strip()
            part = ""
        else:
            part += letter
    if part.strip():
        yield part.strip()


def _value(default: str | None) -> str | None:
    if default is None:
        return None
    default = default.replace('"', "'").strip()
    try:
        # 1e-06 and 9.9999999999999995e-07 are one number
        return repr(float(default))
    except ValueError:
        return default.replace(" ", "") if default.startswith("[") else default


@functools.cache
def generations() -> tuple[Generation, ...]:
    """All generations, oldest first."""
    found = []
    for file in resources.files(__name__).iterdir():
        if file.name.endswith(".json"):
            data = json.loads(file.read_text(encoding="utf-8"))
            schemas = {text.partition("(")[0]: text for text in data["schemas"]}
            found.append(Generation(data["generation"], tuple(data["versions"]), schemas))
    return tuple(sorted(found, key=lambda generation: generation.name))


def generation_of(version: str) -> Generation | None:
    """The generation of a torch_npu release, or None if that release was not read."""
    public = version.partition("+")[0]
    return next((g for g in generations() if public in g.versions), None)


def misfit(declared: str, call: str, live: str | None) -> str | None:
    """Say why a call written for one schema cannot be made with another, or None if it can.

    Args:
        declared: Schema the call was written for.
        call: Names of the arguments the call gives, in order, separated by commas; those after a
            ``*`` are given by name. An empty string: all arguments of the declared schema.
        live: Schema that is there, or None if the operator is not.
    """
    if live is None:
        return "the operator does not exist"
    have, want = parse_schema(live), parse_schema(declared)
    positional, by_name = _given(call, want)
    for place, name in enumerate(positional):
        argument = have.arguments[place] if place < len(have.arguments) else None
        if argument is None or argument.name != name or argument.keyword_only:
            found = "nothing" if argument is None else argument.name
            return f"argument {place + 1} is {found}, the call gives {name}"
    for name in (*positional, *by_name):
        there, ours = have.argument(name), want.argument(name)
        if there is None or ours is None:
            return f"there is no argument {name}"
        if there.type != ours.type:
            return f"argument {name} is {there.type}, the call gives {ours.type}"
    for argument in have.arguments:
        if argument.name in positional or argument.name in by_name:
            continue
        if argument.default is None:
            return f"argument {argument.name} must be given"
        ours = want.argument(argument.name)
        if ours is not None and ours.default != argument.default:
            return f"{argument.name} defaults to {argument.default}, not to {ours.default}"
    if have.returns != want.returns:
        return f"it returns {', '.join(have.returns)}, not {', '.join(want.returns)}"
    return None


def calls_misfit(spec: OperatorSpec, live: str | None) -> str | None:
    """Say why some call that converters make of an operator cannot be made, or None.

    Args:
        spec: Its declaration.
        live: Schema that is there, or None if the operator is not.
    """
    problems = (misfit(spec.schema, call, live) for call in spec.calls or ("",))
    return next((problem for problem in problems if problem), None)


def _given(call: str, declared: Schema) -> tuple[list[str], list[str]]:
    if not call:
        places = [a.name for a in declared.arguments if not a.keyword_only]
        return places, [a.name for a in declared.arguments if a.keyword_only]
    positional, _, by_name = call.partition("*")
    return list(_split(positional)), [name for name in _split(by_name) if name]


def fitting_versions(name: str, declared: str, calls: tuple[str, ...]) -> list[str]:
    """Releases of torch_npu on which every call of an operator can be made, oldest first.

    Args:
        name: Qualified name, e.g. ``"npu::npu_rms_norm"``.
        declared: Schema the calls were written for.
        calls: As ``call`` of ``misfit``.
    """
    from packaging.version import Version

    base = name.partition("::")[2]
    found = [
        version
        for generation in generations()
        for version in generation.versions
        if not any(misfit(declared, c, generation.schemas.get(base)) for c in calls or ("",))
    ]
    return sorted(found, key=Version)
