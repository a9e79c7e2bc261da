"""What torchtitan's models need to run on a CPU, supplied per instance by class swap.

Used by our launcher on machines without accelerator, for converted and unconverted models alike.
No class, function or module of torch or torchtitan is changed.
"""

from __future__ import annotations

import functools
import types
from typing import Any

import torch
from torch import Tensor, nn

from torchtitan_npu_core.apply import add_root_hook
from torchtitan_npu_core.errors import CommandError
from torchtitan_npu_core.fsdp import use_sum_reduction
from torchtitan_npu_core.swap import ReplacementMixin, rebind_globals, replacement_class


class CPUMixin(ReplacementMixin):
    """Base of what a CPU needs; belongs to no converter, so converters may claim the module."""

    torchtitan_npu_prefix = "CPU"


# ---------------------------------------------------------------- integer histograms


def histc(x: Tensor, bins: int = 100, min: float = 0, max: float = 0) -> Tensor:
    """``torch.histc`` that also counts integers ``0 .. bins - 1``."""
    if x.is_floating_point():
        return torch.histc(x, bins, min, max)
    return torch.bincount(x.reshape(-1), minlength=bins)[:bins].to(x.dtype)


@functools.cache
def _torch_with_histc() -> types.ModuleType:
    # a module with torch's names, so that tracers treat it like torch
    module = types.ModuleType("torchtitan_npu_core.cpu_model.torch")
    module.__dict__.update(torch.__dict__)
    module.__dict__.update(__name__=module.__name__, histc=histc)
    return module


class CountsIntegers(CPUMixin):
    """A router or reorderer whose forward counts tokens on a CPU."""

    # what: the original forward, with a torch whose histc counts integers
    # why:  "histogram_cpu" is not implemented for int64
    # ends: when torch.histc takes integers on CPU
    # test: tests/core_torch/test_cpu_model.py::test_histc_counts_like_the_float_kernel
    @classmethod
    def specialize(cls, original: type[nn.Module]) -> dict[str, Any]:
        forward: Any = original.forward
        return {"forward": rebind_globals(forward, {"torch": _torch_with_histc()})}

    def init_weights(self, *args: Any, **kwargs: Any) -> None:
        """As the original, and a gate bias that is not whatever the memory held."""
        # what: zeroes the router's bias
        # why:  torchtitan 0.2.2 never initialises gpt_oss's gate.bias (on any device)
        # ends: when it does
        # test: tests/core_torch/test_cpu_model.py::test_gate_bias_is_initialised
        super().init_weights(*args, **kwargs)  # type: ignore[misc]
        gate = getattr(self, "gate", None)
        if gate is not None and gate.bias is not None:
            nn.init.zeros_(gate.bias)


# ---------------------------------------------------------------- attention


def _visible(mask: Any, length_q: int, length_k: int, device: torch.device) -> Tensor:
    """Evaluate a block mask's function densely, ``[B, H, Q, K]`` bool, B and H possibly 1."""
    known = mask.__dict__.get("_torchtitan_npu_dense")
    if known is None or known.shape[-2:] != (length_q, length_k):
        batch, heads = mask.kv_num_blocks.shape[:2]
        b, h = torch.arange(batch, device=device), torch.arange(heads, device=device)
        q, k = torch.arange(length_q, device=device), torch.arange(length_k, device=device)
        known = mask.mask_mod(
            b[:, None, None, None], h[None, :, None, None], q[None, None, :, None], k
        ).expand(batch, heads, length_q, length_k)
        # kept on the mask: one forward uses it in every layer
        mask.__dict__["_torchtitan_npu_dense"] = known
    return known


def flex_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    score_mod: Any = None,
    block_mask: Any = None,
    scale: float | None = None,
    return_lse: bool = False,
    enable_gqa: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention with a block mask in plain PyTorch, differentiable in all three inputs.

    Args:
        q: ``[B, H, Q, D]``.
        k: ``[B, G, K, D]``; H is a multiple of G with ``enable_gqa``, else G is H.
        v: ``[B, G, K, E]``.
        score_mod: Not supported.
        block_mask: ``torch.nn.attention.flex_attention.BlockMask`` or None for full attention.
        scale: Of the scores; default ``D ** -0.5``.
        return_lse: Also return the log of the softmax denominator, ``[B, H, Q]``, float32.
        enable_gqa: Share each key head among H / G query heads.

    Source:
        torch.nn.attention.flex_attention (torch 2.13.0).
    """
    if score_mod is not None:
        raise CommandError("flex attention with a score_mod has no CPU reference")
    if enable_gqa and q.shape[1] != k.shape[1]:
        k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
        v = v.repeat_interleave(q.shape[1] // v.shape[1], dim=1)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    scores = (q.float() @ k.float().transpose(-2, -1)) * scale
    if block_mask is not None:
        visible = _visible(block_mask, q.shape[-2], k.shape[-2], q.device)
        scores = scores.masked_fill(~visible, float("-inf"))
    lse = torch.logsumexp(scores, dim=-1)
    # a row that sees nothing has weight 0 everywhere, not NaN
    weights = torch.exp(scores - lse.masked_fill(lse == float("-inf"), 0.0).unsqueeze(-1))
    out = (weights.to(v.dtype) @ v).to(q.dtype)
    return (out, lse) if return_lse else out


class EagerFlexAttention(CPUMixin):
    """A flex attention module that computes with ``flex_reference``."""

    # what: plain PyTorch attention in place of the compiled flex kernel
    # why:  FlexAttention has no backward on CPU
    # ends: when it has
    # test: tests/core_torch/test_cpu_model.py::test_flex_reference_equals_sdpa_under_the_same_mask
    def forward(self, q: Tensor, k: Tensor, v: Tensor, **kwargs: Any) -> Any:
        return flex_reference(q, k, v, **kwargs)


class EagerMasks(CPUMixin):
    """A model that builds its attention masks without compiling."""

    # what: the original get_attention_masks, with an eager create_block_mask
    # why:  torchtitan compiles it, which takes a C++ compiler and half a minute
    # ends: when EagerFlexAttention ends
    # test: tests/trainer/test_train.py::test_debug_flavor_trains_alike
    @classmethod
    def specialize(cls, original: type[nn.Module]) -> dict[str, Any]:
        from torch.nn.attention.flex_attention import create_block_mask

        method: Any = getattr(original, "get_attention_masks")  # noqa: B009
        return {
            "get_attention_masks": rebind_globals(
                method, {"create_attention_mask": create_block_mask}
            )
        }


class LocalAttention(CPUMixin):
    """A scaled-dot-product attention module that works on the local part of DTensors."""

    # what: computes on local tensors and gives the result its placements back
    # why:  the CPU's flash attention operator has no DTensor sharding rule
    # ends: when it has
    # test: tests/trainer/test_parallel.py::test_layout_equals_the_unconverted_run
    def forward(self, q: Tensor, k: Tensor, v: Tensor, **kwargs: Any) -> Tensor:
        from torch.distributed.tensor import DTensor, Shard

        if not isinstance(q, DTensor):
            return super().forward(q, k, v, **kwargs)  # type: ignore[misc]
        placements = q.placements
        for placement in placements:
            # heads and batch rows are independent, the sequence is not
            if not (placement.is_replicate() or placement in (Shard(0), Shard(1))):
                raise CommandError(f"attention on a CPU cannot work on queries placed {placements}")
        parts = [t.redistribute(placements=placements).to_local() for t in (q, k, v)]  # type: ignore[union-attr]
        out = super().forward(*parts, **kwargs)  # type: ignore[misc]
        return DTensor.from_local(out, q.device_mesh, placements, run_check=False)


# ---------------------------------------------------------------- the whole model


def prepare_for_cpu(model: nn.Module) -> dict[str, int]:
    """Give a torchtitan model what it needs on a CPU, before it is parallelized.

    Args:
        model: On the meta device or with storage. Only this object is changed.

    Returns:
        How many modules got which treatment.

    Raises:
        CommandError: If the model uses something that cannot run on a CPU.
    """
    done: dict[str, int] = {}

    def swap(module: nn.Module, mixin: type) -> None:
        if not isinstance(module, mixin):
            module.__class__ = replacement_class(mixin, type(module))
            done[mixin.__name__] = done.get(mixin.__name__, 0) + 1

    for fqn, module in model.named_modules():
        name = type(module).__name__
        code = getattr(type(module).forward, "__code__", None)
        if code is not None and "histc" in code.co_names and not isinstance(module, CountsIntegers):
            swap(module, CountsIntegers)
        if name == "VarlenAttentionWrapper":
            raise CommandError(
                f"{fqn} uses variable-length attention, which has no CPU kernel. Choose a flavor "
                f"with sdpa or flex attention."
            )
        if name == "FlexAttentionWrapper":
            swap(module, EagerFlexAttention)
        elif name == "ScaledDotProductAttentionWrapper":
            swap(module, LocalAttention)
        if getattr(module, "use_grouped_mm", False):
            # what: the loop over experts in place of the grouped matmul
            # why:  the grouped path pads with a triton kernel, which has no driver on a CPU
            # ends: when torchtitan's padding has a path without triton
            # test: tests/trainer/test_train.py::test_debug_flavor_trains_alike
            module.use_grouped_mm = False  # type: ignore[assignment]
            done["use_grouped_mm"] = done.get("use_grouped_mm", 0) + 1
    masks = getattr(type(model), "get_attention_masks", None)
    if masks is not None and "create_attention_mask" in masks.__code__.co_names:
        swap(model, EagerMasks)
    add_root_hook(model, use_sum_reduction)
    return done
