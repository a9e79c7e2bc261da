"""Random numbers from the npu generators: seed and offset decide, every draw moves the offset."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from typing import Any

import torch


def default_generator() -> torch.Generator:
    """Generator of the current npu device."""
    npu = torch.get_device_module("npu")
    npu.init()  # makes the generators
    return npu.default_generators[npu.current_device()]


def draw(generator: torch.Generator | None) -> torch.Generator:
    """CPU generator for one draw; the npu generator moves on.

    Two draws from the same seed and offset are equal, as on the device, where an offset names a
    place in one stream of numbers.

    Raises:
        RuntimeError: For a generator of another device, as on the device.
    """
    source = default_generator() if generator is None else generator
    if source.device.type != "npu":
        raise RuntimeError(f"Expected a 'npu' generator, found one on {source.device.type!r}")
    offset = source.get_offset()
    text = f"{source.initial_seed()} {offset}".encode()
    number = int.from_bytes(hashlib.sha256(text).digest()[:8], "little") >> 1
    source.set_offset(offset + 4)
    return torch.Generator().manual_seed(number)


@contextlib.contextmanager
def as_default(generator: torch.Generator) -> Iterator[None]:
    """Let operators without a generator argument draw from this one on the CPU."""
    kept = torch.default_generator.get_state()
    torch.default_generator.set_state(generator.get_state())
    try:
        yield
    finally:
        torch.default_generator.set_state(kept)


def is_random(op: Any) -> bool:
    """Whether an operator draws random numbers."""
    return torch.Tag.nondeterministic_seeded in op.tags
