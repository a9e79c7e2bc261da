"""Plugin entry module: declarations only, so it must stay importable without torch."""

from __future__ import annotations

import logging
from collections import deque
from typing import TYPE_CHECKING

from torchtitan_npu_core import ConverterSpec, DeviceLimit, OperatorSpec, OptionSpec, hookimpl

if TYPE_CHECKING:
    from torchtitan_npu_core.apply import ConversionResult
    from torchtitan_npu_core.plan import ConversionPlan

logger = logging.getLogger(__name__)

CONVERTER = "acme_scaled_gelu"
SOURCE = "Gaussian Error Linear Units (arXiv 1606.08415), section 2; torch.nn.GELU (torch 2.13.0)"

LIMITS = (
    DeviceLimit(
        quantity="input_dims",
        families=("a2", "a3", "950"),
        maximum=8,
        reason="Acme's kernel keeps eight strides",
    ),
)

SCALED_GELU = OperatorSpec(
    name="acme::scaled_gelu",
    schema="scaled_gelu(Tensor input, float scale=1.0) -> Tensor",
    kernels="acme_torchtitan_npu_gelu.ops:SCALED_GELU",
    limits=LIMITS,
    source=SOURCE,
)
SCALED_GELU_BACKWARD = OperatorSpec(
    name="acme::scaled_gelu_backward",
    schema="scaled_gelu_backward(Tensor grad, Tensor input, float scale=1.0) -> Tensor",
    kernels="acme_torchtitan_npu_gelu.ops:SCALED_GELU_BACKWARD",
    limits=LIMITS,
    source=SOURCE,
)

recent_conversions: deque[tuple[str, ...]] = deque(maxlen=16)
"""Names of the modules this plugin converted, one entry per converted model, newest last."""


@hookimpl
def torchtitan_npu_converters() -> list[ConverterSpec]:
    return [
        ConverterSpec(
            name=CONVERTER,
            summary="Acme's GELU with a factor",
            replaces=("torch.nn.GELU",),
            factory="acme_torchtitan_npu_gelu.converter:ScaledGELUConverter",
            operators=("acme::scaled_gelu", "acme::scaled_gelu_backward"),
            options=(
                OptionSpec(
                    name="scale",
                    default=1.0,
                    summary="factor on the activation; any value but 1.0 changes the model's "
                    "mathematics",
                ),
            ),
        ),
    ]


@hookimpl
def torchtitan_npu_operators() -> list[OperatorSpec]:
    return [SCALED_GELU, SCALED_GELU_BACKWARD]


@hookimpl
def torchtitan_npu_selective_save_operators() -> list[str]:
    # the next linear layer reads this output in its backward: keeping it costs one hidden
    # activation per block and saves running the operator a second time
    return ["acme::scaled_gelu"]


@hookimpl
def torchtitan_npu_before_conversion(plan: ConversionPlan) -> None:
    # a factor other than 1.0 is legal and trains another model: say so before it happens
    notes = {row.note for row in plan.rows_of(CONVERTER, "replaced") if row.note}
    for note in sorted(notes):
        logger.warning("[%s] %s", CONVERTER, note)


@hookimpl
def torchtitan_npu_after_conversion(result: ConversionResult) -> None:
    # observers hear of every conversion in the process, also of those by other plugins; a hook
    # implementation may leave out the arguments it does not need
    replaced = result.replaced.get(CONVERTER)
    if replaced:
        recent_conversions.append(tuple(replaced))
