"""Record the operator calls of a program, and hold them against the device library's operators.

A recording holds no tensors, only what they look like, so it can be pickled and replayed in another
process than it was made in: a job recorded on a CPU is held against torch_npu where that is loaded.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from torchtitan_npu_core.testing.checks import PromiseError


@dataclass(frozen=True, slots=True)
class TensorLook:
    """What an operator's fake kernel can know of a tensor."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> TensorLook:
        """Look of one tensor."""
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype)

    def on_meta(self) -> Tensor:
        """A tensor that looks so, without memory."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="meta")


@dataclass(frozen=True, slots=True)
class RecordedCall:
    """One call of an operator, with a ``TensorLook`` for every tensor.

    Args:
        operator: Qualified name, e.g. ``"npu::npu_rms_norm"``.
        overload: Name of the overload, mostly ``"default"``.
        args: Positional arguments.
        kwargs: Keyword arguments.
        outputs: Looks of the tensors it returned.
    """

    operator: str
    overload: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: tuple[TensorLook, ...]


def _looks(value: Any) -> Any:
    return pytree.tree_map_only(Tensor, TensorLook.of, value)


class CallRecorder(TorchDispatchMode):
    """Context manager that records the calls of operators in some namespaces, below autograd.

    Args:
        namespaces: Operator namespaces to record.

    Attributes:
        calls: The calls in the order they were made, those of backward included.
    """

    def __init__(self, namespaces: Sequence[str] = ("npu",)) -> None:
        super().__init__()
        self.namespaces = frozenset(namespaces)
        self.calls: list[RecordedCall] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.namespace in self.namespaces:
            outputs = tuple(_looks(pytree.tree_leaves(result)))
            name, overload = func._schema.name, func._overloadname
            call = RecordedCall(name, overload, _looks(tuple(args)), _looks(kwargs or {}), outputs)
            self.calls.append(call)
        return result


def replay_on_meta(calls: Iterable[RecordedCall]) -> int:
    """Bind every recorded call to this process's operator and run its fake kernel.

    Args:
        calls: A recording; equal calls are replayed once.

    Returns:
        How many different calls were replayed.

    Raises:
        PromiseError: If an operator does not exist, refuses the arguments, or describes other
            outputs (number, shapes or dtypes) than the call gave.
    """
    done: list[RecordedCall] = []
    for call in calls:
        if call not in done:
            _replay(call)
            done.append(call)
    return len(done)


def _replay(call: RecordedCall) -> None:
    namespace, _, base = call.operator.partition("::")
    args, kwargs = pytree.tree_map_only(TensorLook, TensorLook.on_meta, (call.args, call.kwargs))
    try:
        overload = getattr(getattr(getattr(torch.ops, namespace), base), call.overload)
        with torch.no_grad():
            found = pytree.tree_leaves(overload(*args, **kwargs))
    except Exception as error:
        promise = f"{call.operator} takes the recorded call"
        raise PromiseError(promise, f"{call}: {type(error).__name__}: {error}") from error
    told = [(tuple(t.shape), t.dtype) for t in found]
    want = [(look.shape, look.dtype) for look in call.outputs]
    if told != want:
        promise = f"{call.operator} describes the outputs of the recorded call"
        raise PromiseError(promise, f"{call}: it says {told}")
