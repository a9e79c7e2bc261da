"""The plugin API: hook specifications and the markers that implementations use."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    from torchtitan_npu_core.apply import ConversionResult
    from torchtitan_npu_core.plan import ConversionPlan
    from torchtitan_npu_core.specs import ConverterSpec, OperatorSpec

PROJECT = "torchtitan_npu"
ENTRY_POINT_GROUP = "torchtitan_npu.converters"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec
def torchtitan_npu_converters() -> Iterable[ConverterSpec]:  # type: ignore[empty-body]
    """Return the converters this plugin offers.

    Called once per process, on every rank, possibly before torch is importable.
    Return the same value every time and do not import torch here.

    Added in core 0.1.
    """


@hookspec
def torchtitan_npu_operators() -> Iterable[OperatorSpec]:  # type: ignore[empty-body]
    """Return the operators, with reference kernels, that this plugin's converters call.

    Called at most once per process. The operators are registered when one of the plugin's
    converters is used. Do not import torch here: kernels are named by import path.

    Added in core 0.1.
    """


@hookspec
def torchtitan_npu_selective_save_operators() -> Iterable[str]:  # type: ignore[empty-body]
    """Return names of operators whose outputs selective activation checkpointing should keep.

    Called when one of the plugin's converters is used on a model. Names are qualified,
    e.g. ``"npu::npu_rotary_mul"``. Only the converted model's checkpointed blocks are affected.

    Added in core 0.1.
    """


@hookspec
def torchtitan_npu_before_conversion(plan: ConversionPlan) -> None:
    """Observe a plan just before it is carried out, on every rank.

    Args:
        plan: What is about to be replaced, module by module. Do not change it.

    Exceptions raised here are logged and do not stop the run.

    Added in core 0.1.
    """


@hookspec
def torchtitan_npu_after_conversion(plan: ConversionPlan, result: ConversionResult) -> None:
    """Observe a conversion that succeeded, on every rank.

    Args:
        plan: The plan that was carried out.
        result: What was done, with counts per converter.

    Exceptions raised here are logged and do not stop the run.

    Added in core 0.1.
    """
