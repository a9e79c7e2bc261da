"""Mistakes that the checks of the norm and rotary operators have to notice."""

import functools

import torch

from torchtitan_npu_core.testing import Mutation
from torchtitan_npu_op_norm_rope import ops, reference

npu = torch.ops.npu


def kernel(name, caught_by, function, field="reference"):
    return Mutation(name=name, caught_by=caught_by, kernels={field: function})


def changing(function, change):
    """A function whose results are changed afterwards."""

    @functools.wraps(function)
    def wrong(*args, **kwargs):
        return change(*function(*args, **kwargs))

    return wrong


# ---------------------------------------------------------------- rms norm


def norm(x, gamma, rstd, scaled=lambda normed, gamma, dtype: normed * gamma):
    """RMS norm from its parts."""
    wide = reference.compute_dtype(x.dtype)
    return scaled(x.to(wide) * rstd, gamma.to(wide), x.dtype).to(x.dtype).contiguous(), rstd


def mean_square(x, gamma):
    x = x.to(reference.compute_dtype(x.dtype))
    return x.square().mean(tuple(range(-gamma.dim(), 0)), keepdim=True)


def with_rstd(rstd):
    return lambda x, gamma, eps=1e-6: norm(x, gamma, rstd(mean_square(x, gamma), eps))


def with_scaling(scaled):
    return lambda x, gamma, eps=1e-6: norm(x, gamma, (mean_square(x, gamma) + eps).rsqrt(), scaled)


def mean_over_last_dim(x, gamma, eps=1e-6):
    y, _ = norm(x, gamma, (mean_square(x, gamma.flatten(0, -1)) + eps).rsqrt())
    return y, reference.rms_norm(x, gamma, eps)[1]


def mean_over_rows(x, gamma, eps=1e-6):
    rstd = (x.to(reference.compute_dtype(x.dtype)).square().mean(0, keepdim=True) + eps).rsqrt()
    return norm(x, gamma, rstd)[0], reference.rms_norm(x, gamma, eps)[1]


def squares_in_input_dtype(x, gamma, eps=1e-6):
    mean = x.square().mean(tuple(range(-gamma.dim(), 0)), keepdim=True)
    return norm(x, gamma, (mean.to(reference.compute_dtype(x.dtype)) + eps).rsqrt())


def another_default_eps(x, gamma, eps=1e-5):
    return reference.rms_norm(x, gamma, eps)


def differentiable_rstd(ctx, inputs, output):
    ctx.save_for_backward(inputs[0], inputs[1], output[1])


NORM = (
    kernel("eps-outside-root", "formula", with_rstd(lambda m, eps: 1 / (m.sqrt() + eps))),
    kernel("no-eps", "formula", with_rstd(lambda m, eps: m.rsqrt())),
    kernel("eps-twice", "formula", with_rstd(lambda m, eps: (m + 2 * eps).rsqrt())),
    kernel("root-not-inverted", "formula", with_rstd(lambda m, eps: (m + eps).sqrt())),
    kernel("another-default-eps", "formula", another_default_eps),
    kernel("mean-over-last-dim-only", "formula", mean_over_last_dim),
    kernel("mean-over-rows", "formula", mean_over_rows),
    kernel("no-gamma", "formula", with_scaling(lambda n, gamma, dtype: n)),
    kernel("one-plus-gamma", "formula", with_scaling(lambda n, gamma, dtype: n * (1 + gamma))),
    kernel(
        "gamma-after-cast",
        "precision",
        with_scaling(lambda n, gamma, dtype: n.to(dtype) * gamma.to(dtype)),
    ),
    kernel(
        "gamma-rounded-first",
        "precision",
        with_scaling(lambda n, gamma, dtype: n * gamma.to(dtype)),
    ),
    kernel("squares-in-input-dtype", "precision", squares_in_input_dtype),
    kernel(
        "rstd-in-input-dtype",
        "fake",
        lambda x, gamma, eps=1e-6: changing(reference.rms_norm, lambda y, r: (y, r.to(x.dtype)))(
            x, gamma, eps
        ),
    ),
    kernel(
        "rstd-without-trailing-ones",
        "fake",
        changing(reference.rms_norm, lambda y, rstd: (y, rstd.squeeze(-1))),
    ),
    kernel("one-output", "formula", changing(reference.rms_norm, lambda y, rstd: (y,))),
    kernel("differentiable-rstd", "gradients", differentiable_rstd, "setup_context"),
    kernel(
        "no-gradient-of-gamma",
        "gradients",
        changing(ops._backward_rms_norm, lambda dx, dgamma, _: (dx, None, None)),
        "backward",
    ),
)


def norm_gradients(dx=lambda g, n, rstd, mean: rstd * (g - n * mean(g * n)), dgamma=None):
    """Gradients of RMS norm with one of them replaced; n is normalised, g is dy * gamma."""

    def wrong(dy, x, gamma, rstd):
        wide = reference.compute_dtype(x.dtype)
        trailing, leading = range(-gamma.dim(), 0), range(x.dim() - gamma.dim())
        n, dy = x.to(wide) * rstd, dy.to(wide)
        grad = dx(dy * gamma.to(wide), n, rstd, lambda t: t.mean(tuple(trailing), keepdim=True))
        product = dgamma(dy, n) if dgamma else dy * n
        weight = product.sum(tuple(leading)) if leading else product
        return grad.to(x.dtype).contiguous(), weight.to(wide).contiguous()

    return wrong


def rstd_of_default_eps(dy, x, gamma, rstd):
    return reference.rms_norm_backward(dy, x, gamma, reference.rms_norm(x, gamma)[1])


def dgamma_without_last_row(dy, x, gamma, rstd):
    dx, dgamma = reference.rms_norm_backward(dy, x, gamma, rstd)
    if x.dim() == gamma.dim() or not len(x):
        return dx, dgamma
    return dx, reference.rms_norm_backward(dy[:-1], x[:-1], gamma, rstd[:-1])[1]


NORM_BACKWARD = (
    kernel("no-projection", "formula", norm_gradients(lambda g, n, rstd, mean: rstd * g)),
    kernel(
        "rstd-to-the-second",
        "formula",
        norm_gradients(lambda g, n, rstd, mean: rstd * g - n * mean(g * n)),
    ),
    kernel(
        "sum-instead-of-mean",
        "formula",
        norm_gradients(lambda g, n, rstd, mean: rstd * (g - n * mean(g * n) * g.shape[-1])),
    ),
    kernel("rstd-of-the-default-eps", "formula", rstd_of_default_eps),
    kernel("dgamma-of-raw-input", "formula", norm_gradients(dgamma=lambda dy, n: dy)),
    kernel("dgamma-without-last-row", "formula", dgamma_without_last_row),
    kernel(
        "dgamma-of-rounded-products",
        "precision",
        norm_gradients(dgamma=lambda dy, n: (dy * n).bfloat16().to(dy.dtype)),
    ),
    kernel(
        "dgamma-in-gamma-dtype",
        "fake",
        lambda dy, x, gamma, rstd: changing(
            reference.rms_norm_backward, lambda dx, dgamma: (dx, dgamma.to(gamma.dtype))
        )(dy, x, gamma, rstd),
    ),
    kernel("lost-second-derivative", "gradients", lambda ctx, *_: (None,) * 4, "backward"),
)

# ---------------------------------------------------------------- rotary

OTHER_MODE = {"half": "interleave", "interleave": "half", "quarter": "half"}


def rotated(x, mode):
    wide = reference.compute_dtype(x.dtype)
    return reference.rotate(x.to(wide), mode)


def rotary(rotate=rotated, tables=lambda cos, sin: (cos, sin), in_dtype=lambda t: t):
    """Rotation with one step replaced."""

    def wrong(x, cos, sin, mode="half", matrix=None):
        wide = reference.compute_dtype(x.dtype)
        cos, sin = tables(*(t.to(x.dtype).to(wide) for t in (cos, sin)))
        y = in_dtype(x.to(wide) * cos) + in_dtype(rotate(x, mode) * sin)
        return y.to(x.dtype).contiguous()

    return wrong


def neighbours_alike(x, cos, sin, mode="half", matrix=None):
    """Takes the tables of the first of two neighbours for both."""
    if mode == "interleave":
        cos, sin = (t[..., 0::2].repeat_interleave(2, -1) for t in (cos, sin))
    return reference.rotary_mul(x, cos, sin, mode)


def rounded_products(x, cos, sin, mode="half", matrix=None):
    return x * cos.to(x.dtype) + reference.rotate(x, mode) * sin.to(x.dtype)


def unrounded_tables(x, cos, sin, mode="half", matrix=None):
    wide = reference.compute_dtype(x.dtype)
    return (x.to(wide) * cos.to(wide) + rotated(x, mode) * sin.to(wide)).to(x.dtype)


def backward_without_transpose(ctx, grad):
    _, cos, sin = ctx.saved_tensors
    _, dcos, dsin, *rest = ops._backward_rotary_mul(ctx, grad)
    return npu.npu_rotary_mul(grad, cos, sin, ctx.rotary_mode), dcos, dsin, *rest


def forgets_the_mode(ctx, grad):
    ctx.rotary_mode = "half"
    return ops._backward_rotary_mul(ctx, grad)


ROTARY = (
    kernel("other-pairs", "formula", rotary(lambda x, mode: rotated(x, OTHER_MODE[mode]))),
    kernel("other-sign", "formula", rotary(lambda x, mode: -rotated(x, mode))),
    kernel("no-sign", "formula", rotary(lambda x, mode: rotated(x, mode).abs())),
    kernel("sine-for-cosine", "formula", rotary(tables=lambda cos, sin: (sin, cos))),
    kernel(
        "table-of-the-partner",
        "formula",
        rotary(tables=lambda cos, sin: (cos, sin.roll(sin.shape[-1] // 2, -1))),
    ),
    kernel("neighbours-alike", "formula", neighbours_alike),
    kernel(
        "another-default-mode",
        "formula",
        lambda x, cos, sin, mode="interleave", matrix=None: reference.rotary_mul(x, cos, sin, mode),
    ),
    kernel(
        "table-of-the-first-sample",
        "formula",
        rotary(tables=lambda cos, sin: (cos[:1], sin[:1]) if cos.dim() == 4 else (cos, sin)),
    ),
    kernel("rounded-products", "precision", rounded_products),
    kernel("tables-not-rounded", "precision", unrounded_tables),
    kernel("output-in-float32", "fake", lambda *args: reference.rotary_mul(*args).float()),
    kernel("gradient-without-transpose", "gradients", backward_without_transpose, "backward"),
    kernel("gradient-of-default-mode", "gradients", forgets_the_mode, "backward"),
    kernel(
        "no-table-gradients",
        "gradients",
        changing(ops._backward_rotary_mul, lambda dx, dcos, dsin, *_: (dx, None, None, None, None)),
        "backward",
    ),
    kernel(
        "table-gradients-swapped",
        "gradients",
        changing(ops._backward_rotary_mul, lambda dx, dcos, dsin, *_: (dx, dsin, dcos, *_)),
        "backward",
    ),
)


def rotary_gradients(change):
    return changing(reference.rotary_mul_backward, change)


def without_transpose(grad, x, cos, sin, mode="half"):
    _, dcos, dsin = reference.rotary_mul_backward(grad, x, cos, sin, mode)
    return reference.rotary_mul(grad, cos, sin, mode), dcos, dsin


def last_row_of_tables(grad, x, cos, sin, mode="half"):
    """Writes the table gradients of every broadcast row, keeps the last."""
    dx, dcos, dsin = reference.rotary_mul_backward(grad, x, cos, sin, mode)
    wide = reference.compute_dtype(x.dtype)
    product = (grad.to(wide) * x.to(wide)).to(x.dtype)
    for dim in range(x.dim()):
        if cos.shape[dim] != x.shape[dim] and x.shape[dim]:
            product = product.narrow(dim, x.shape[dim] - 1, 1)
    return dx, product.contiguous() if x.numel() else dcos, dsin


ROTARY_BACKWARD = (
    kernel("no-transpose", "formula", without_transpose),
    kernel("last-row-of-tables", "formula", last_row_of_tables),
    kernel("tables-swapped", "formula", rotary_gradients(lambda dx, dc, ds: (dx, ds, dc))),
    kernel("sine-gradient-negated", "formula", rotary_gradients(lambda dx, dc, ds: (dx, dc, -ds))),
    kernel(
        "zeros-where-the-device-writes-nothing",
        "formula",
        rotary_gradients(lambda dx, dc, ds: (dx, dc.nan_to_num(), ds.nan_to_num())),
    ),
    kernel(
        "table-gradients-in-float32",
        "fake",
        rotary_gradients(lambda dx, dc, ds: (dx, dc.float(), ds.float())),
    ),
    kernel("lost-second-derivative", "gradients", lambda ctx, *_: (None,) * 5, "backward"),
)
