"""Recognise rotary embedding in a module by contract: signature, data flow and mathematics.

Models call rotary embedding as a function of their own Python module. A module is a target if its
forward calls such a function with one of its own parameters as the table, and if the function, run
on small inputs, computes one of the two known conventions. Names of models and classes play no
part, and a function with other mathematics is refused.
"""

from __future__ import annotations

import dis
import functools
import inspect
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True)
class RotaryContract:
    """How one module class applies rotary embedding.

    Args:
        function: Global name its forward calls.
        mode: ``interleave`` or ``half``.
        num_tensors: Tensors rotated per call, 1 or 2.
        num_calls: Calls in one forward.
        cache_name: Parameter, of the forward and of the function, that carries the table.
        cache_index: Position of that parameter in the forward, ``self`` not counted.
        complex_cache: Whether the table is complex ``[rows, D / 2]`` or real ``[rows, 2 * D]``,
            cosines then sines.
        parameters: Names of the function's parameters.
        positions_name: Name of its positions parameter, or empty.
        wide: Whether the function computes in float32 whatever the input's dtype.
    """

    function: str
    mode: str
    num_tensors: int
    num_calls: int
    cache_name: str
    cache_index: int
    complex_cache: bool
    parameters: tuple[str, ...]
    positions_name: str
    wide: bool


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a module that calls a rotary function cannot be converted."""

    reason: str


@functools.cache
def rotary_contract(cls: type[nn.Module]) -> RotaryContract | Refusal | None:
    """Recognise a module class.

    Returns:
        The contract, a refusal with its reason, or None if the class calls no rotary function.
    """
    forward = cls.forward
    if not isinstance(forward, types.FunctionType):
        return None
    refusal: Refusal | None = None
    for name in forward.__code__.co_names:
        function = forward.__globals__.get(name)
        if not isinstance(function, types.FunctionType):
            continue
        found = _examine(forward, name, function)
        if isinstance(found, RotaryContract):
            return found
        refusal = refusal or found
    return refusal


def _sounds_rotary(name: str) -> bool:
    lowered = name.lower()
    return "rope" in lowered or "rotary" in lowered


def _examine(
    forward: types.FunctionType, name: str, function: types.FunctionType
) -> RotaryContract | Refusal | None:
    # a function that merely sounds like one is reported; one that does not is nobody's business
    refuse = Refusal if _sounds_rotary(name) else lambda reason: None
    where = f"{forward.__module__}.{name}"
    try:
        parameters = tuple(inspect.signature(function).parameters)
        own = tuple(inspect.signature(forward).parameters)[1:]
    except ValueError:
        return None
    shared = [p for p in parameters if p in own and p != "positions"]
    tables = [p for p in shared if parameters.index(p) in (1, 2)]
    if not tables:
        return refuse(f"{where} does not get its table from a parameter of forward")
    cache_name = tables[0]
    num_tensors = parameters.index(cache_name)
    rest = parameters[num_tensors + 1 :]
    if rest not in ((), ("positions",)):
        return refuse(f"{where} has parameters that are not known: {', '.join(rest)}")
    calls = _loads(forward, name)
    if _loads(forward, cache_name) != calls or calls == 0:
        return refuse(f"forward uses {cache_name} for something else than {name}")
    # whatever the caller's default device is: numbers are compared, and the answer is kept
    with torch.device("cpu"):
        probed = _probe(function, num_tensors, bool(rest))
    if probed is None:
        return refuse(
            f"{where} computes neither the interleaved nor the half-split rotation of its input"
        )
    mode, complex_cache, wide = probed
    return RotaryContract(
        function=name,
        mode=mode,
        num_tensors=num_tensors,
        num_calls=calls,
        cache_name=cache_name,
        cache_index=own.index(cache_name),
        complex_cache=complex_cache,
        parameters=parameters,
        positions_name=rest[0] if rest else "",
        wide=wide,
    )


def _loads(function: types.FunctionType, name: str) -> int:
    """How often the code reads a name, local or global."""
    number = 0
    for instruction in dis.get_instructions(function):
        if instruction.opname.startswith(("LOAD_FAST", "LOAD_GLOBAL")):
            # newer interpreters load two locals with one instruction
            value = instruction.argval
            number += list(value).count(name) if isinstance(value, tuple) else value == name
    return number


# ---------------------------------------------------------------- mathematics

_ROWS, _WIDTH = 5, 8


def _probe(
    function: Callable[..., Any], num_tensors: int, has_positions: bool
) -> tuple[str, bool, bool] | None:
    """Run a function on small inputs: its mode, whether its table is complex, whether it is wide.

    The tables are random, so that cosine and sine, their order and their signs all show.
    """
    generator = torch.Generator().manual_seed(0)
    draw = functools.partial(torch.randn, generator=generator, device="cpu", dtype=torch.float32)
    # small integers are exact in bfloat16, so that only the tables' rounding shows there
    x = torch.randint(-8, 9, (2, _ROWS, 3, _WIDTH), generator=generator, device="cpu").float()
    half = _WIDTH // 2
    cos, sin = draw(_ROWS + 2, half), draw(_ROWS + 2, half)
    for complex_cache in (True, False):
        cache = torch.complex(cos, sin) if complex_cache else torch.cat((cos, cos, sin, sin), -1)
        got = _run(function, x, num_tensors, cache, None)
        if got is None:
            continue
        for mode in ("interleave", "half"):
            if not torch.allclose(got, _expected(x, cos, sin, mode, None), atol=1e-5, rtol=1e-5):
                continue
            if has_positions and not _follows_positions(
                function, x, num_tensors, cache, cos, sin, mode
            ):
                return None
            low = _run(function, x.bfloat16(), num_tensors, cache, None)
            rounded = _expected(x, cos, sin, mode, None).bfloat16()
            return mode, complex_cache, low is not None and torch.equal(low, rounded)
    return None


def _run(
    function: Callable[..., Any], x: Tensor, num_tensors: int, cache: Tensor, positions: Any
) -> Tensor | None:
    extra = () if positions is None else (positions,)
    try:
        with torch.no_grad():
            out = function(*[x.clone() for _ in range(num_tensors)], cache, *extra)
    except Exception:
        # not a function of these arguments: that is the answer, not a fault
        return None
    outputs = out if isinstance(out, tuple | list) else (out,)
    if len(outputs) != num_tensors:
        return None
    for output in outputs:
        if not isinstance(output, Tensor) or output.shape != x.shape or output.dtype != x.dtype:
            return None
        if not torch.equal(output, outputs[0]):
            return None
    return outputs[0]


def _expected(x: Tensor, cos: Tensor, sin: Tensor, mode: str, positions: Any) -> Tensor:
    """The rotation written out, independent of the kernels: one complex product per pair."""
    if positions is None:
        rows = torch.arange(x.shape[1]).expand(x.shape[0], -1)
    else:
        rows = positions.expand(x.shape[0], -1).long()
    c, s = cos[rows].unsqueeze(2), sin[rows].unsqueeze(2)
    if mode == "interleave":
        a, b = x[..., 0::2], x[..., 1::2]
        return torch.stack((a * c - b * s, a * s + b * c), -1).flatten(-2)
    a, b = x.chunk(2, -1)
    return torch.cat((a * c - b * s, a * s + b * c), -1)


def _follows_positions(
    function: Callable[..., Any],
    x: Tensor,
    num_tensors: int,
    cache: Tensor,
    cos: Tensor,
    sin: Tensor,
    mode: str,
) -> bool:
    shared = torch.tensor([[3, 0, 6, 1, 2]])
    per_row = torch.tensor([[3, 0, 6, 1, 2], [0, 1, 2, 0, 1]])
    for positions in (shared, per_row):
        got = _run(function, x, num_tensors, cache, positions)
        want = _expected(x, cos, sin, mode, positions)
        if got is None or not torch.allclose(got, want, atol=1e-5, rtol=1e-5):
            return False
    return True
