"""Plugin entry module: declarations only, so it must stay importable without torch."""

from torchtitan_npu_core import (
    ConverterSpec,
    DeviceLimit,
    KnownIssue,
    OperatorSpec,
    OptionSpec,
    hookimpl,
)

ATLAS = ("a2", "a3")

RMS_NORM = OperatorSpec(
    name="npu::npu_rms_norm",
    schema="npu_rms_norm(Tensor input, Tensor gamma, float epsilon=1e-06) -> (Tensor, Tensor)",
    kernels="torchtitan_npu_op_norm_rope.ops:RMS_NORM",
    limits=(
        DeviceLimit(
            quantity="input_dims", families=(*ATLAS, "950"), maximum=8, reason="documented rank"
        ),
    ),
    source="op-plugin docs: torch_npu-npu_rms_norm",
)
RMS_NORM_BACKWARD = OperatorSpec(
    name="npu::npu_rms_norm_backward",
    schema=(
        "npu_rms_norm_backward(Tensor dy, Tensor input, Tensor gamma, Tensor rstd) "
        "-> (Tensor, Tensor)"
    ),
    kernels="torchtitan_npu_op_norm_rope.ops:RMS_NORM_BACKWARD",
    source="op-plugin docs: torch_npu-npu_rms_norm; CANN ops-nn: aclnnRmsNormGrad",
    known_issues=(
        KnownIssue(
            generations=("A", "B"),
            text="its fake kernel gives dgamma the dtype of gamma, the device gives float32: do "
            "not compile models with 16-bit norm weights",
        ),
    ),
)
ROTARY_LIMITS = (
    DeviceLimit(
        quantity="rotary_mode",
        families=ATLAS,
        choices=("half", "interleave"),
        reason="other modes exist on 950 only",
    ),
    DeviceLimit(quantity="head_dim", families=ATLAS, maximum=895, reason="D < 896"),
    DeviceLimit(quantity="head_dim", families=("950",), maximum=1024, reason="D <= 1024"),
    DeviceLimit(
        quantity="interleave_rows",
        families=ATLAS,
        maximum=999,
        reason="batch x heads < 1000 in interleave mode",
    ),
    DeviceLimit(
        quantity="half_batch", families=ATLAS, maximum=999, reason="batch < 1000 in half mode"
    ),
    DeviceLimit(
        quantity="half_heads", families=ATLAS, maximum=999, reason="heads < 1000 in half mode"
    ),
    DeviceLimit(
        quantity="table_grad_rows",
        families=ATLAS,
        maximum=1024,
        reason="batch x heads <= 1024 when cos or sin need a gradient",
    ),
)
ROTARY_MUL = OperatorSpec(
    name="npu::npu_rotary_mul",
    schema=(
        'npu_rotary_mul(Tensor input, Tensor r1, Tensor r2, str rotary_mode="half", '
        "Tensor? rotate=None) -> Tensor"
    ),
    kernels="torchtitan_npu_op_norm_rope.ops:ROTARY_MUL",
    limits=ROTARY_LIMITS,
    source="op-plugin docs: torch_npu-npu_rotary_mul",
    calls=("input, r1, r2, rotary_mode",),  # rotate came with generation C
)
ROTARY_MUL_BACKWARD = OperatorSpec(
    name="npu::npu_rotary_mul_backward",
    schema=(
        "npu_rotary_mul_backward(Tensor grad, Tensor input, Tensor r1, Tensor r2, "
        'str rotary_mode="half") -> (Tensor, Tensor, Tensor)'
    ),
    kernels="torchtitan_npu_op_norm_rope.ops:ROTARY_MUL_BACKWARD",
    limits=ROTARY_LIMITS,
    source="op-plugin docs: torch_npu-npu_rotary_mul; CANN ops-transformer: "
    "rotary_position_embedding_grad",
)


@hookimpl
def torchtitan_npu_converters() -> list[ConverterSpec]:
    return [
        ConverterSpec(
            name="npu_rms_norm",
            summary="Fused RMSNorm",
            replaces=("torch.nn.RMSNorm",),
            factory="torchtitan_npu_op_norm_rope.converter:RMSNormConverter",
            operators=("npu::npu_rms_norm", "npu::npu_rms_norm_backward"),
        ),
        ConverterSpec(
            name="npu_rope",
            summary="Fused rotary embedding",
            replaces=(
                "modules whose forward calls a rotary function of its own Python module, "
                "with a signature and mathematics that were recognised",
            ),
            factory="torchtitan_npu_op_norm_rope.converter:RotaryConverter",
            operators=("npu::npu_rotary_mul", "npu::npu_rotary_mul_backward"),
            options=(
                OptionSpec(
                    name="fp32",
                    default=False,
                    summary="always rotate in float32 and cast back, also where the unconverted "
                    "model rotates in the activation dtype",
                ),
            ),
        ),
    ]


@hookimpl
def torchtitan_npu_operators() -> list[OperatorSpec]:
    return [RMS_NORM, RMS_NORM_BACKWARD, ROTARY_MUL, ROTARY_MUL_BACKWARD]


@hookimpl
def torchtitan_npu_selective_save_operators() -> list[str]:
    # the rotated query and key are what attention's backward reads; keeping them saves the
    # projection outputs' second rotation for the price of two activations per layer
    return ["npu::npu_rotary_mul"]
