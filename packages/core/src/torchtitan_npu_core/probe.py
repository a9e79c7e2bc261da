"""Count operator calls: the answer to "does the fused operator really run"."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class OperatorProbe(TorchDispatchMode):
    """Context manager that counts dispatcher calls of operators in some namespaces.

    Calls are counted below autograd, in forward, in backward and in recomputation, on every thread
    that autograd uses for this process's devices.

    Args:
        namespaces: Operator namespaces to count.

    Attributes:
        counts: Calls by qualified name, e.g. ``{"npu::npu_rms_norm": 12}``.
    """

    def __init__(self, namespaces: Sequence[str] = ("npu", "torchtitan_npu")) -> None:
        super().__init__()
        self.namespaces = frozenset(namespaces)
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func.namespace in self.namespaces:
            self.counts[func._schema.name] += 1
        return func(*args, **(kwargs or {}))
