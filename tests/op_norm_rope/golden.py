"""Formulas from the operators' documentation in float64, with plain loops over rows and pairs."""

import math

import torch


def rms_norm(x, gamma, eps=1e-6):
    """y and rstd, float64."""
    width = gamma.numel()
    rows = x.double().reshape(-1, width)
    flat = gamma.double().reshape(-1)
    y, rstd = torch.empty_like(rows), torch.empty(rows.shape[0], dtype=torch.float64)
    for i, row in enumerate(rows.tolist()):
        scale = 1 / math.sqrt(sum(v * v for v in row) / width + eps)
        rstd[i] = scale
        for j, v in enumerate(row):
            y[i, j] = v * scale * flat[j]
    lead = x.shape[: x.dim() - gamma.dim()]
    return y.reshape(x.shape), rstd.reshape(*lead, *[1] * gamma.dim())


def rms_norm_grads(dy, x, gamma, eps):
    """Gradients of x and gamma, float64."""
    return rms_norm_grads_from_rstd(dy, x, gamma, rms_norm(x, gamma, eps)[1])


def rms_norm_grads_from_rstd(dy, x, gamma, rstd):
    """The same from what the forward returned, one rstd per row."""
    width = gamma.numel()
    rows, out = (t.double().reshape(-1, width) for t in (x, dy))
    dx, dgamma = torch.empty_like(rows), [0.0] * width
    weight, scales = gamma.double().flatten().tolist(), rstd.double().flatten().tolist()
    for i, scale in enumerate(scales):
        row, grad = rows[i].tolist(), out[i].tolist()
        inner = sum(g * w * v for g, w, v in zip(grad, weight, row, strict=True)) / width
        for j in range(width):
            dx[i, j] = grad[j] * weight[j] * scale - row[j] * scale**3 * inner
            dgamma[j] += grad[j] * row[j] * scale
    dgamma = torch.tensor(dgamma, dtype=torch.float64)
    return dx.reshape(x.shape), dgamma.reshape(gamma.shape)


def pairs(mode, width):
    """(first, second) index of every pair that is rotated together."""
    if mode == "interleave":
        return [(i, i + 1) for i in range(0, width, 2)]
    if mode == "half":
        return [(i, i + width // 2) for i in range(width // 2)]
    if mode == "quarter":
        q = width // 4
        return [(i, i + q) for i in range(q)] + [(i + 2 * q, i + 3 * q) for i in range(q)]
    raise AssertionError(mode)


def rotary(x, cos, sin, mode):
    """Rotate each pair, float64."""
    x, cos, sin = (t.double() for t in (x, cos.expand(x.shape), sin.expand(x.shape)))
    y = torch.empty_like(x)
    for a, b in pairs(mode, x.shape[-1]):
        y[..., a] = x[..., a] * cos[..., a] - x[..., b] * sin[..., a]
        y[..., b] = x[..., b] * cos[..., b] + x[..., a] * sin[..., b]
    return y


def rotary_grads(dy, x, cos, sin, mode):
    """Gradients of x, cos and sin, float64; those of the tables in their own shape."""
    shape = cos.shape
    dy, x, cos, sin = (t.double().expand(x.shape) for t in (dy, x, cos, sin))
    dx, dsin = torch.empty_like(dy), torch.empty_like(dy)
    for a, b in pairs(mode, x.shape[-1]):
        dx[..., a] = dy[..., a] * cos[..., a] + dy[..., b] * sin[..., b]
        dx[..., b] = dy[..., b] * cos[..., b] - dy[..., a] * sin[..., a]
        dsin[..., a] = -dy[..., a] * x[..., b]
        dsin[..., b] = dy[..., b] * x[..., a]
    return dx, (dy * x).sum_to_size(shape), dsin.sum_to_size(shape)
