"""What the norm and rotary operators have to do, and the mistakes that have to be noticed."""

import torch
import torch.nn.functional as F

from tests.op_norm_rope import golden, wrong
from torchtitan_npu_core.testing import Call, OperatorCase

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
DTYPES = (FP32, BF16, FP16)
PERMUTED = "torch_npu's fake kernel keeps the strides of a permuted input, kernels write rows"


def draw(*shape):
    return torch.randn(shape, dtype=torch.float64)


# ---------------------------------------------------------------- rms norm


def norm(shape, gamma_shape, *eps, view=lambda x: x, scale=1.0, gamma_dtype=None):
    def make(dtype):
        x = view((draw(*shape) * scale).to(dtype))
        return Call(x, draw(*gamma_shape).to(gamma_dtype or dtype), *eps)

    return make


def with_zero_row(x):
    x[1] = 0
    return x


NORM_INPUTS = {
    "rows": norm((3, 8), (8,), 1e-2),
    "odd": norm((2, 5, 7), (7,), 1e-5),
    "two-dims": norm((2, 3, 4, 6), (4, 6), 1e-6),
    "vector": norm((4,), (4,), 1e-2),
    # the gradient is 0 but for eps: a smaller one would leave only what float32 cancels
    "single": norm((1,), (1,), 1e-2),
    "wide-odd": norm((5, 131), (131,), 1e-5),
    "split-view": norm((2, 5, 12), (8,), 1e-5, view=lambda x: x[..., 2:10]),
    "transposed": norm((2, 8, 5), (8,), 1e-5, view=lambda x: x.transpose(1, 2)),
    "expanded": norm((1, 3, 6), (6,), 1e-5, view=lambda x: x.expand(2, 3, 6)),
    "empty": norm((0, 8), (8,), 1e-5),
    "zero-row": norm((3, 8), (8,), 1e-2, view=with_zero_row),
    "tiny-default-eps": norm((3, 6), (6,), scale=1e-3),
    "float32-gamma": norm((2, 5, 7), (7,), 1e-5, gamma_dtype=FP32),
}


def norm_backward(make):
    def made(dtype):
        call = make(dtype)
        _, rstd = call.run(golden.rms_norm)
        dy = draw(*call.args[0].shape).to(dtype)
        return Call(dy, *call.args[:2], rstd.to(torch.promote_types(dtype, FP32)))

    return made


def norm_gradients(begin, x, gamma, eps=1e-6):
    return golden.rms_norm_grads(begin[0], x, gamma, eps)


def norm_stock(x, gamma, eps=1e-6):
    return F.rms_norm(x, gamma.shape, gamma, eps)


NORM = OperatorCase(
    operator="npu::npu_rms_norm",
    inputs=NORM_INPUTS,
    dtypes=DTYPES,
    formula=golden.rms_norm,
    gradients=norm_gradients,
    stock=norm_stock,
    fake_differences={"transposed": PERMUTED},
    mutations=wrong.NORM,
)
NORM_BACKWARD = OperatorCase(
    operator="npu::npu_rms_norm_backward",
    inputs={label: norm_backward(make) for label, make in NORM_INPUTS.items()},
    dtypes=DTYPES,
    formula=golden.rms_norm_grads_from_rstd,
    derivative="C",
    fake_differences={"transposed": PERMUTED},
    mutations=wrong.NORM_BACKWARD,
)

# ---------------------------------------------------------------- rotary


def rotary(shape, table, *mode, view=lambda x: x, alike=False, table_dtype=None):
    def make(dtype):
        cos, sin = draw(2, *table).to(table_dtype or dtype).unbind()
        if alike:
            cos, sin = (t[..., 0::2].repeat_interleave(2, -1) for t in (cos, sin))
        return Call(view(draw(*shape).to(dtype)), cos, sin, *mode)

    return make


ROTARY_INPUTS = {
    "bsnd-half": rotary((2, 5, 3, 8), (1, 5, 1, 8), "half"),
    "bnsd-half-odd": rotary((2, 3, 7, 6), (1, 1, 7, 6)),
    "sbnd-half": rotary((5, 2, 3, 8), (5, 1, 1, 8), "half"),
    "tnd-half": rotary((7, 3, 8), (7, 1, 8), "half"),
    "per-sample-half": rotary((2, 5, 3, 4), (2, 5, 1, 4), "half"),
    "full-half": rotary((2, 3, 2, 4), (2, 3, 2, 4), "half"),
    "bsnd-interleave": rotary((2, 5, 3, 8), (1, 5, 1, 8), "interleave"),
    "bnsd-interleave-alike": rotary((2, 3, 5, 8), (1, 1, 5, 8), "interleave", alike=True),
    "tnd-interleave-alike": rotary((9, 3, 6), (9, 1, 6), "interleave", alike=True),
    "single-interleave": rotary((1, 1, 1, 2), (1, 1, 1, 2), "interleave"),
    "long-half": rotary((1, 63, 2, 64), (1, 63, 1, 64), "half"),
    "long-interleave": rotary((1, 63, 2, 64), (1, 63, 1, 64), "interleave"),
    "quarter": rotary((2, 5, 3, 8), (1, 5, 1, 8), "quarter"),
    "split-view": rotary((2, 5, 3, 12), (1, 5, 1, 8), "interleave", view=lambda x: x[..., 4:]),
    "transposed": rotary((2, 3, 5, 8), (1, 5, 1, 8), "half", view=lambda x: x.transpose(1, 2)),
    "empty": rotary((0, 5, 3, 8), (1, 5, 1, 8), "half"),
    "float32-tables": rotary((2, 5, 3, 8), (1, 5, 1, 8), "half", table_dtype=FP32),
}


def rotary_backward(make, tables_need_grad):
    def made(dtype):
        x, cos, sin, *mode = make(dtype).args
        cos.requires_grad_(tables_need_grad)
        return Call(draw(*x.shape).to(dtype), x, cos, sin, *mode)

    return made


def rotary_formula(x, cos, sin, mode="half"):
    # tables come in the dtype of the input, others are rounded to it
    return golden.rotary(x, cos.to(x.dtype), sin.to(x.dtype), mode)


def rotary_gradients(begin, x, cos, sin, mode="half"):
    return golden.rotary_grads(begin[0], x, cos.to(x.dtype), sin.to(x.dtype), mode)


def rotary_backward_formula(grad, x, cos, sin, mode="half"):
    dx, dcos, dsin = rotary_gradients((grad,), x, cos, sin, mode)
    if not (cos.requires_grad or sin.requires_grad):
        # the device does not write them
        dcos, dsin = (torch.full_like(t, torch.nan) for t in (dcos, dsin))
    return dx, dcos, dsin


def rotary_stock(x, cos, sin, mode="half"):
    rotated = torch.zeros_like(x)
    for a, b in golden.pairs(mode, x.shape[-1]):
        rotated = rotated.index_copy(-1, torch.tensor([a]), -x[..., b : b + 1])
        rotated = rotated.index_copy(-1, torch.tensor([b]), x[..., a : a + 1])
    return x * cos.to(x.dtype) + rotated * sin.to(x.dtype)


ROTARY = OperatorCase(
    operator="npu::npu_rotary_mul",
    inputs=ROTARY_INPUTS,
    dtypes=DTYPES,
    formula=rotary_formula,
    gradients=rotary_gradients,
    stock=rotary_stock,
    mutations=wrong.ROTARY,
)
ROTARY_BACKWARD = OperatorCase(
    operator="npu::npu_rotary_mul_backward",
    inputs={label: rotary_backward(make, True) for label, make in ROTARY_INPUTS.items()}
    | {
        f"{label}-frozen-tables": rotary_backward(ROTARY_INPUTS[label], False)
        for label in ("bsnd-half", "bsnd-interleave", "bnsd-interleave-alike")
    },
    dtypes=DTYPES,
    formula=rotary_backward_formula,
    derivative="C",
    fake_differences={"transposed": PERMUTED},
    mutations=wrong.ROTARY_BACKWARD,
)

CASES = (NORM, NORM_BACKWARD, ROTARY, ROTARY_BACKWARD)
