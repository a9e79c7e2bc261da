"""Dense attention as ``npu_fusion_attention_v3``, which torch_npu calls for torch's own attention.

``out = softmax(scale * query @ key.T, mask) @ value`` with the softmax in float32. A mask marks
what is left out. Forms that plain torch code does not lead to are refused.

Source: op-plugin docs, torch_npu-npu_fusion_attention.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchtitan_npu_core.errors import OperatorArgumentError
from torchtitan_npu_core.testing.virtual_npu import random

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
CAUSAL_MASK = 2048
"""Size of the square mask that stands for any causal mask."""

_REPEATED = 8
"""The device keeps softmax statistics in blocks of this many equal numbers."""


def _heads_first(x: Tensor, layout: str, num_heads: int) -> Tensor:
    """``[B, N, S, D]`` from any layout."""
    if layout == "BNSD":
        return x
    if layout == "SBH":
        x = x.transpose(0, 1)
    if layout != "BSND":
        x = x.unflatten(-1, (num_heads, -1))
    return x.transpose(1, 2)


def _back(x: Tensor, layout: str) -> Tensor:
    """The layout again, from ``[B, N, S, D]``."""
    if layout == "BNSD":
        return x
    x = x.transpose(1, 2)
    if layout == "BSND":
        return x
    x = x.flatten(2)
    return x.transpose(0, 1) if layout == "SBH" else x


def _refuse(what: str) -> OperatorArgumentError:
    return OperatorArgumentError(f"npu_fusion_attention_v3: {what}")


def _check(
    query: Tensor, key: Tensor, value: Tensor, num_heads: int, layout: str, unsupported: dict
) -> None:
    if layout not in ("BNSD", "BSND", "BSH", "SBH"):
        raise _refuse(f"layout {layout!r} is not computed on a virtual NPU")
    given = [name for name, x in unsupported.items() if x is not None]
    if given:
        raise _refuse(f"{', '.join(given)} is not computed on a virtual NPU")
    dtypes = {query.dtype, key.dtype, value.dtype}
    if len(dtypes) > 1 or query.dtype not in DTYPES:
        raise _refuse("query, key and value must be all float16, all bfloat16 or all float32")
    if layout in ("BNSD", "BSND"):
        heads = layout.index("N")
        if query.shape[heads] != num_heads:
            raise _refuse(f"head_num is {num_heads}, query has {query.shape[heads]} heads")
        if key.shape[heads] == 0 or num_heads % key.shape[heads]:
            raise _refuse(f"{num_heads} query heads cannot share {key.shape[heads]} key heads")


def _hidden(mask: Tensor | None, sparse_mode: int, num_queries: int, num_keys: int) -> Any:
    """What the softmax leaves out: broadcasts over ``[B, N, Sq, Skv]``; None is nothing."""
    if mask is None:
        return None  # the device then ignores the mode
    if mask.dtype not in (torch.bool, torch.uint8):
        raise _refuse(f"atten_mask is {mask.dtype}, it must be bool or uint8")
    if sparse_mode in (0, 1):
        return mask.bool()
    if sparse_mode not in (2, 3):
        raise _refuse(f"sparse_mode {sparse_mode} is not computed on a virtual NPU")
    if tuple(mask.shape) != (CAUSAL_MASK, CAUSAL_MASK):
        raise _refuse(
            f"atten_mask is {tuple(mask.shape)}; sparse_mode {sparse_mode} takes the triangle of "
            f"{CAUSAL_MASK} x {CAUSAL_MASK}"
        )
    # 2 aligns the triangle at the first key, 3 at the last
    first = 1 if sparse_mode == 2 else num_keys - num_queries + 1
    return torch.ones(num_queries, num_keys, dtype=torch.bool).triu(first)


def _logits(query: Tensor, key: Tensor, scale: float, hidden: Tensor | None) -> Tensor:
    logits = scale * (query.float() @ key.float().mT)
    return logits if hidden is None else logits.masked_fill(hidden, float("-inf"))


def _dropped(shape: torch.Size, keep_prob: float, seed: int) -> Tensor:
    """Factor of every probability: 0, or what makes up for the zeros."""
    generator = torch.Generator().manual_seed(seed)
    return torch.empty(shape).bernoulli_(keep_prob, generator=generator) / keep_prob


def _repeat(key: Tensor, num_heads: int) -> Tensor:
    return key.repeat_interleave(num_heads // key.shape[1], 1)


def _fold(grad: Tensor, num_heads: int) -> Tensor:
    """Sum over the query heads that share a key head."""
    return grad.unflatten(1, (num_heads, -1)).sum(2)


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    head_num: int,
    input_layout: str,
    pse: Tensor | None = None,
    padding_mask: Tensor | None = None,
    atten_mask: Tensor | None = None,
    scale: float = 1.0,
    keep_prob: float = 1.0,
    pre_tockens: int = 2147483647,
    next_tockens: int = 2147483647,
    inner_precise: int = 0,
    prefix: Any = None,
    actual_seq_qlen: Tensor | None = None,
    actual_seq_kvlen: Tensor | None = None,
    sparse_mode: int = 0,
    gen_mask_parallel: bool = True,
    sync: bool = False,
    softmax_layout: str = "",
    sink: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """Attention.

    Args:
        query: Float, in ``input_layout``: ``BNSD``, ``BSND``, ``BSH`` or ``SBH``.
        key: Like query, with as many heads or a divisor of them.
        value: Like key; the last dim may differ.
        head_num: Heads of the query.
        input_layout: Order of batch, heads, sequence and head dim.
        atten_mask: Bool, True is left out; or the triangle that stands for a causal mask.
        scale: Factor of the logits.
        keep_prob: Probability that dropout keeps a weight.
        sparse_mode: 0 and 1 take the mask as it is, 2 and 3 are causal.

    Returns:
        The output in the layout of the query, row maxima and row sums ``[B, N, Sq, 8]`` in float32,
        an empty tensor, and seed and offset ``[1]`` of dropout.

    Raises:
        OperatorArgumentError: For dtypes and forms that are not accepted.
    """
    unsupported = {"pse": pse, "padding_mask": padding_mask, "prefix": prefix, "sink": sink}
    unsupported |= {"actual_seq_qlen": actual_seq_qlen, "actual_seq_kvlen": actual_seq_kvlen}
    _check(query, key, value, head_num, input_layout, unsupported)
    q, k, v = _split(query, key, value, head_num, input_layout)
    logits = _logits(
        q, _repeat(k, head_num), scale, _hidden(atten_mask, sparse_mode, q.shape[2], k.shape[2])
    )
    maximum = logits.amax(-1, keepdim=True)
    maximum = maximum.masked_fill(maximum.isinf(), 0)  # a row that sees nothing gives zeros
    weights = (logits - maximum).exp()
    total = weights.sum(-1, keepdim=True)
    probabilities = weights / total.masked_fill(total == 0, 1)
    seed = 0
    if keep_prob < 1:
        seed = random.draw(None).initial_seed()
        probabilities = probabilities * _dropped(probabilities.shape, keep_prob, seed)
    out = _back((probabilities @ _repeat(v, head_num).float()).to(query.dtype), input_layout)
    statistics = [x.expand(*x.shape[:-1], _REPEATED).contiguous() for x in (maximum, total)]
    return out.contiguous(), *statistics, query.new_empty(0), *torch.tensor([[seed], [0]])


def _split(
    query: Tensor, key: Tensor, value: Tensor, num_heads: int, layout: str
) -> tuple[Tensor, ...]:
    if layout in ("BSH", "SBH"):
        num_keys = key.shape[-1] * num_heads // query.shape[-1]
    else:
        num_keys = key.shape[layout.index("N")]
    counts = (num_heads, num_keys, num_keys)
    return tuple(
        _heads_first(x, layout, n) for x, n in zip((query, key, value), counts, strict=True)
    )


def backward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dy: Tensor,
    head_num: int,
    input_layout: str,
    *,
    atten_mask: Tensor | None = None,
    softmax_max: Tensor | None = None,
    softmax_sum: Tensor | None = None,
    attention_in: Tensor | None = None,
    scale_value: float = 1.0,
    keep_prob: float = 1.0,
    seed: Tensor | None = None,
    sparse_mode: int = 0,
    pse: Tensor | None = None,
    padding_mask: Tensor | None = None,
    prefix: Any = None,
    sink: Tensor | None = None,
    actual_seq_qlen: Tensor | None = None,
    actual_seq_kvlen: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, ...]:
    """Gradients of query, key and value, in their layout and dtype, and two empty tensors.

    Args:
        dy: Gradient of the output.
        softmax_max: From ``forward``, as are ``softmax_sum`` and ``seed``.
        attention_in: Output of ``forward``.

    Raises:
        OperatorArgumentError: For dtypes and forms that are not accepted.
    """
    unsupported = {"pse": pse, "padding_mask": padding_mask, "prefix": prefix, "sink": sink}
    unsupported |= {"actual_seq_qlen": actual_seq_qlen, "actual_seq_kvlen": actual_seq_kvlen}
    _check(query, key, value, head_num, input_layout, unsupported)
    if softmax_max is None or softmax_sum is None or attention_in is None:
        raise _refuse("backward needs softmax_max, softmax_sum and attention_in")
    q, k, v = _split(query, key, value, head_num, input_layout)
    hidden = _hidden(atten_mask, sparse_mode, q.shape[2], k.shape[2])
    grad = _heads_first(dy, input_layout, head_num).float()
    out = _heads_first(attention_in, input_layout, head_num).float()
    wide_k, wide_v = _repeat(k, head_num).float(), _repeat(v, head_num).float()
    total = softmax_sum[..., :1]
    probabilities = (_logits(q, wide_k, scale_value, hidden) - softmax_max[..., :1]).exp()
    probabilities = probabilities / total.masked_fill(total == 0, 1)
    factor: Tensor | float = 1.0
    if keep_prob < 1 and seed is not None:
        factor = _dropped(probabilities.shape, keep_prob, int(seed))
    dv = (probabilities * factor).mT @ grad
    # the sum over a row of weight times its gradient is the output times the output's gradient
    dp = factor * (grad @ wide_v.mT) - (grad * out).sum(-1, keepdim=True)
    ds = scale_value * probabilities * dp
    num_keys = k.shape[1]
    grads = (ds @ wide_k, _fold(ds.mT @ q.float(), num_keys), _fold(dv, num_keys))
    results = [_back(g.to(query.dtype), input_layout).contiguous() for g in grads]
    return *results, query.new_empty(0), query.new_empty(())


KERNELS = {"npu_fusion_attention_v3": forward, "npu_fusion_attention_grad_v3": backward}
"""Kernels by operator name."""
