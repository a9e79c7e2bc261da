"""Kernels for the ``npu`` namespace: the reference kernels that installed plugins declare."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torchtitan_npu_core.errors import NoReferenceError
from torchtitan_npu_core.limits import enforce_limits, targeting
from torchtitan_npu_core.testing.virtual_npu.aten import kernel, registered
from torchtitan_npu_core.testing.virtual_npu.memory import host
from torchtitan_npu_core.testing.virtual_npu.twins import TWINS

if TYPE_CHECKING:
    from torchtitan_npu_core.operators import OperatorKernels
    from torchtitan_npu_core.specs import OperatorSpec

# torch_npu's own kernels, which only look after storages
_KEPT = {
    "empty_with_format",
    "empty_with_format.names",
    "unsafe_empty_with_format",
    "get_npu_format",
    "get_storage_size",
    "npu_change_data_ptr",
}


@functools.cache
def _declared() -> dict[str, tuple[OperatorSpec, OperatorKernels]]:
    # installed plugins are read at the first call, not when torch is imported: that may be in the
    # middle of importing one of them
    from torchtitan_npu_core.loading import discover_and_load
    from torchtitan_npu_core.operators import declared_specs, load_kernels

    specs = declared_specs(discover_and_load())
    return {name: (spec, load_kernels(spec)) for name, spec in specs.items()}


def _alias(value: Any) -> Any:
    alias = host(value)
    if isinstance(value, Tensor) and value.requires_grad and alias is not value:
        # some kernels write a gradient only for tensors that want one
        alias.requires_grad_()
    return alias


def _reference(op: Any) -> Callable[..., Any]:
    """Kernel of one operator that looks its declaration up when it is called."""
    name = op._schema.name

    def compute(*args: Any, **kwargs: Any) -> Any:
        known = _declared().get(name) if not op._schema.overload_name else None
        if known is None:
            raise NoReferenceError(str(op))
        from torchtitan_npu_core.operators import device_family

        spec, kernels = known
        kernels.check(*args, **kwargs)
        with targeting(device_family()):
            enforce_limits(spec, kernels.measure(*args, **kwargs))
        return kernels.reference(*args, **kwargs)

    return kernel(op, compute, _alias)


def install(library: torch.library.Library) -> int:
    """Register the kernels in a library for ``npu`` and PrivateUse1; return how many."""
    count = 0
    for name, op in registered("npu"):
        if name in _KEPT:
            continue
        twin = TWINS.get(name)
        library.impl(name, kernel(op, twin) if twin else _reference(op), allow_override=True)
        count += 1
    return count
