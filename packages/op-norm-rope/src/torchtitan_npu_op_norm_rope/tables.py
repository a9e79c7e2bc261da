"""Cosine and sine tables of one model, derived once and shared by its layers.

Shape letters in this file:
    M rows of the model's table, L sequence, B batch, D rotated width

A model keeps its rotary table as a buffer of its root module and hands it to every layer. The
operators want cosines and sines of full width instead. They are derived from the buffer when the
root's forward starts, and again only when the buffer is another tensor or was written to.

A layer may also run without the root: in the recomputation of activation checkpointing, or because
somebody calls it. It then gets what its own arguments say: the tables that were used for the same
tensors in forward if they are remembered, freshly derived ones if not.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

TABLES_ATTRIBUTE = "_torchtitan_npu_rotary_tables"

Pair = tuple[Tensor, Tensor]


def derive(cache: Tensor) -> Pair:
    """Return cosines and sines of full width.

    Args:
        cache: Complex ``[M, D / 2]``, whose pairs are neighbours, or real ``[M, 2 * D]``, cosines
            then sines.

    Returns:
        Two tensors ``[M, D]`` in the real dtype of ``cache``.
    """
    if cache.is_complex():
        # the device has no kernels that index or slice complex tensors: use the real view
        real = torch.view_as_real(cache)
        return tuple(part.repeat_interleave(2, dim=-1) for part in real.unbind(-1))  # type: ignore[return-value]
    width = cache.shape[-1] // 2
    return cache[..., :width].contiguous(), cache[..., width:].contiguous()


def rows_of(table: Tensor, index: Tensor) -> Tensor:
    """Rows ``[*index.shape, D]`` of a table ``[M, D]``; a negative index is an error, as gathering
    makes it, and not a row from the end."""
    return table.index_select(0, index.reshape(-1)).view(*index.shape, table.shape[-1])


def plain(tensor: Tensor) -> Tensor:
    """The tensor behind a DTensor or behind a view of the whole of another tensor."""
    from torch.distributed.tensor import DTensor

    if isinstance(tensor, DTensor):
        tensor = tensor._local_tensor
    base = tensor._base
    if (
        base is not None
        and base.dtype == tensor.dtype
        and base.shape == tensor.shape
        and base.stride() == tensor.stride()
        and base.storage_offset() == tensor.storage_offset()
    ):
        return base
    return tensor


def _state(tensor: Tensor) -> tuple[int, int] | None:
    """What changes when a tensor is written to or given other storage; None if that cannot be told.

    Inference tensors have no version. Writes through ``.data`` or a shared numpy array leave none.
    """
    if tensor.is_inference():
        return None
    return tensor._version, tensor.untyped_storage()._cdata


@contextmanager
def _ordinary_tensors() -> Iterator[None]:
    """Make tensors that later forwards may save for backward, whatever mode the caller is in."""
    with torch.inference_mode(False), torch.no_grad():
        yield


def _ordinary(tensor: Tensor) -> Tensor:
    return tensor.clone() if tensor.is_inference() else tensor


@dataclass(eq=False)
class _Derived:
    """Tables made from one state of one tensor, with their casts."""

    source: weakref.ref[Tensor]
    state: tuple[int, int] | None
    shape: torch.Size
    dtype: torch.dtype
    pair: Pair
    casts: dict[tuple[torch.dtype, torch.dtype], Pair] = field(default_factory=dict)
    # per positions tensor; entries live as long as that tensor, so as long as a checkpointed
    # forward that may be recomputed
    gathered: WeakTensorKeyDictionary = field(default_factory=WeakTensorKeyDictionary)

    def is_of(self, tensor: Tensor) -> bool:
        state = _state(tensor)
        return self.source() is tensor and state is not None and self.state == state

    def equals(self, cache: Tensor) -> bool:
        """Whether a real table is the source of these tables, rounded to another dtype."""
        source = self.source()
        return source is not None and torch.equal(source.to(cache.dtype), cache)

    def cast(self, through: torch.dtype, to: torch.dtype) -> Pair:
        """The tables rounded as the host rounded its table on the way, then to ``to``."""
        if self.dtype == through == to:
            return self.pair
        key = (through, to)
        if key not in self.casts:
            cos, sin = (t if t.dtype == through else t.to(through) for t in self.pair)
            self.casts[key] = (cos.to(to), sin.to(to))
        return self.casts[key]

    def at(
        self, positions: Tensor, through: torch.dtype, to: torch.dtype, forward: int | None
    ) -> Pair:
        """Rows of the tables, gathered once per forward, positions tensor and dtype.

        Args:
            positions: Row numbers.
            through: See ``cast``.
            to: See ``cast``.
            forward: Number of the root's forward that runs now; None outside, where a recomputed
                layer finds what its forward gathered.
        """
        state = _state(positions)
        known = None if state is None else self.gathered.get(positions)
        if known is None or known[0] != state or forward not in (None, known[1]):
            known = (state, forward, {})
            if state is not None:
                self.gathered[positions] = known
        pairs = known[2]
        if (through, to) not in pairs:
            index = _ordinary(positions).long()
            pairs[(through, to)] = tuple(rows_of(t, index) for t in self.cast(through, to))
        return pairs[(through, to)]


class RotaryTables:
    """The tables of one model. Shared by its root and all its converted modules.

    Copies start empty: what is derived belongs to one model's buffers.

    Attributes:
        num_derivations: How often tables were derived from a model's table, for tests and probes.
    """

    def __init__(self) -> None:
        self.num_derivations = 0
        self.positions_index = -1
        self.positions_name = ""
        self.sources: tuple[str, ...] = ()
        self._derived: dict[str, _Derived] = {}
        self._current: tuple[_Derived, ...] | None = None
        # (model's table, cosines, sines) for compiled layers; kept after forward, because a
        # compiled layer that is recomputed must issue the same operators again
        self._traced: tuple[tuple[Tensor, Tensor, Tensor], ...] = ()
        self._num_forwards = 0
        # tables used for a copy of the model's table that the host had cast, e.g. FSDP per block
        self._cast_copies = WeakTensorKeyDictionary()
        # modules that were seen to get such copies, with the tables they were compared with
        self._trusted: weakref.WeakKeyDictionary[nn.Module, _Derived] = weakref.WeakKeyDictionary()

    def __deepcopy__(self, memo: dict[int, Any]) -> RotaryTables:
        return RotaryTables()._like(self)

    def __getstate__(self) -> dict[str, Any]:
        return {k: getattr(self, k) for k in ("sources", "positions_index", "positions_name")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__()  # type: ignore[misc]
        self.__dict__.update(state)

    def _like(self, other: RotaryTables) -> RotaryTables:
        self.__setstate__(other.__getstate__())
        return self

    def watch(self, model: nn.Module) -> None:
        """Find the buffers of a root module that hold its table, and its positions argument.

        A buffer counts if it is a two-dimensional table that the root's forward reads.
        """
        code = getattr(type(model).forward, "__code__", None)
        read = set(code.co_names) if code is not None else set()
        self.sources = tuple(
            name
            for name, buffer in model._buffers.items()
            if name in read
            and buffer is not None
            and buffer.dim() == 2
            and (buffer.is_complex() or buffer.is_floating_point())
        )
        names = list(inspect.signature(type(model).forward).parameters)[1:]
        if "positions" in names:
            self.positions_name = "positions"
            self.positions_index = names.index("positions")

    def start(self, model: nn.Module) -> None:
        """Bring the tables up to date with a model's buffers; its forward begins."""
        current = []
        self._num_forwards += 1
        for name in self.sources:
            buffer = model._buffers.get(name)
            if buffer is None or buffer.is_meta:
                continue
            derived = self._derived.get(name)
            if derived is None or not derived.is_of(buffer):
                derived = self._derive(buffer)
                self._derived[name] = derived
            current.append(derived)
        self._current = tuple(current)
        self._traced = tuple(
            (buffer, *self._derived[name].pair)
            for name, buffer in model._buffers.items()
            if name in self._derived and buffer is not None
        )

    def stop(self) -> None:
        """The model's forward ended, with or without an exception."""
        self._current = None

    def _derive(self, cache: Tensor) -> _Derived:
        self.num_derivations += 1
        with _ordinary_tensors():
            pair = derive(_ordinary(cache))
        return _Derived(
            weakref.ref(cache), _state(cache), cache.shape, pair[0].dtype, (pair[0], pair[1])
        )

    def _find(self, cache: Tensor, owner: nn.Module) -> _Derived:
        """Tables for the table a layer was given."""
        for derived in self._derived.values():
            if derived.is_of(cache):
                return derived
        known = self._cast_copies.get(cache)
        if known is not None:
            return known
        if self._current is not None and not cache.is_complex():
            # inside the root's forward a table of another dtype may be a copy that the host made
            alike = [d for d in self._current if d.shape == cache.shape and d.dtype != cache.dtype]
            if len(alike) == 1 and self._is_copy(cache, alike[0], owner):
                if not cache.is_inference():
                    self._cast_copies[cache] = alike[0]
                return alike[0]
        return self._derive(cache)

    def _is_copy(self, cache: Tensor, derived: _Derived, owner: nn.Module) -> bool:
        # comparing waits for the device: once per module and state of the table, then it is known
        # that this module gets copies and not a table computed from the model's
        if self._trusted.get(owner) is derived:
            return True
        if not derived.equals(cache):
            return False
        self._trusted[owner] = derived
        return True

    def lookup(
        self,
        cache: Tensor,
        positions: Tensor | None,
        length: int,
        dtype: torch.dtype,
        owner: nn.Module,
    ) -> Pair:
        """Cosines and sines for one call.

        Args:
            owner: The module that asks.
            cache: The table as the layer got it, ``[M, D / 2]`` complex or ``[M, 2 * D]`` real.
            positions: None, ``[1, L]`` or ``[B, L]``.
            length: Sequence length L.
            dtype: Of the result.

        Returns:
            Two tensors, ``[1, L, 1, D]``, or ``[B, L, 1, D]`` for positions per row.
        """
        if torch.compiler.is_compiling():
            return self._lookup_traced(cache, positions, length, dtype)
        cache = plain(cache)
        derived = self._find(cache, owner)
        through = derived.dtype if cache.is_complex() else cache.dtype
        forward = None if self._current is None else self._num_forwards
        with _ordinary_tensors():
            if positions is None:
                cos, sin = (t[None, :length, None] for t in derived.cast(through, dtype))
            else:
                pair = derived.at(plain(positions), through, dtype, forward)
                cos, sin = (t.unsqueeze(2) for t in pair)
        return cos, sin

    def _lookup_traced(
        self, cache: Tensor, positions: Tensor | None, length: int, dtype: torch.dtype
    ) -> Pair:
        # a tracer guards on two inputs being the same object, and so can compare them; weak
        # references and versions mean nothing to it. A copy of the table (a cast by FSDP, a
        # DTensor) is another object: its tables are derived in the graph.
        pair: Pair | None = None
        for source, cos, sin in self._traced:
            if source is cache:
                pair = (cos, sin)
        if pair is None:
            pair = derive(_local(cache))
        if not cache.is_complex():
            pair = (pair[0].to(cache.dtype), pair[1].to(cache.dtype))
        if positions is None:
            return pair[0][None, :length, None].to(dtype), pair[1][None, :length, None].to(dtype)
        index = _local(positions).long()
        cos, sin = (rows_of(t, index).unsqueeze(2).to(dtype) for t in pair)
        return cos, sin


def _local(tensor: Tensor) -> Tensor:
    from torch.distributed.tensor import DTensor

    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def before_forward(model: nn.Module, args: Any, kwargs: Any) -> None:
    """Forward pre-hook of a converted model's root."""
    if not torch.compiler.is_compiling():
        getattr(model, TABLES_ATTRIBUTE).start(model)


def after_forward(model: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
    """Forward hook of a converted model's root, called after an exception too."""
    if not torch.compiler.is_compiling():
        getattr(model, TABLES_ATTRIBUTE).stop()
