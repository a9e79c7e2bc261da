"""The converters of this package: what they claim, and why they refuse."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from torchtitan_npu_core.plan import Converter, JobSizes, Replacement, RootSetup, Sizes, Skip
from torchtitan_npu_core.swap import replacement_class
from torchtitan_npu_op_norm_rope.contract import Refusal, rotary_contract
from torchtitan_npu_op_norm_rope.modules import FusedRMSNorm, FusedRotary
from torchtitan_npu_op_norm_rope.tables import (
    TABLES_ATTRIBUTE,
    RotaryTables,
    after_forward,
    before_forward,
)


class RMSNormConverter(Converter):
    """Replaces ``torch.nn.RMSNorm``."""

    def claim(self, fqn: str, module: nn.Module, model: nn.Module) -> Replacement | Skip | None:
        cls = type(module)
        if not isinstance(module, nn.RMSNorm):
            return _look_alike(module)
        # a subclass is the same mathematics only if it left the forward alone
        if cls.forward is not nn.RMSNorm.forward:
            return Skip(f"{cls.__name__} has a forward of its own, with other mathematics")
        if "forward" in module.__dict__:
            return Skip("its forward was replaced on the instance")
        return Replacement(
            cls=replacement_class(FusedRMSNorm, cls),
            note="scale of ones: it has no weight" if module.weight is None else "",
            calls={"npu::npu_rms_norm": 1},
        )


def _look_alike(module: nn.Module) -> Skip | None:
    name = type(module).__name__
    if "rmsnorm" in name.lower() and next(module.children(), None) is None:
        return Skip(
            f"{name} is not torch.nn.RMSNorm; its mathematics (order of cast and scale, centring "
            f"of the weight) is not known"
        )
    return None


def _rotary_sizes(mode: str, module: nn.Module, job: JobSizes) -> Sizes:
    """Quantities of a rotary call, as far as the module's attributes tell them."""
    sizes: dict[str, Any] = {"rotary_mode": mode}
    # the rotated part of a head, where a head has one, comes first
    for name in ("qk_rope_head_dim", "head_dim"):
        width = getattr(module, name, None)
        if isinstance(width, int):
            sizes["head_dim"] = width
            break
    heads = getattr(module, "n_heads", None)
    if isinstance(heads, int):
        heads = max(1, heads // job.tensor_parallel)
        if mode == "interleave":
            sizes["interleave_rows"] = job.batch * heads
        else:
            sizes["half_batch"], sizes["half_heads"] = job.batch, heads
    return {"npu::npu_rotary_mul": sizes}


class RotaryConverter(Converter):
    """Replaces modules that apply rotary embedding through a function of their Python module."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        super().__init__(options)
        self.tables = RotaryTables()

    def claim(self, fqn: str, module: nn.Module, model: nn.Module) -> Replacement | Skip | None:
        cls = type(module)
        contract = rotary_contract(cls)
        if contract is None:
            return None
        if isinstance(contract, Refusal):
            return Skip(contract.reason)
        if getattr(module, "use_rope", True) is False:
            return Skip("this layer uses no rotary embedding")
        if "forward" in module.__dict__:
            return Skip("its forward was replaced on the instance")
        wide = contract.wide or bool(self.options.get("fp32", False))
        notes = [f"{contract.mode} pairs", "float32" if wide else "activation dtype"]
        if contract.positions_name and contract.mode == "interleave":
            notes.append("positions per row as [batch * seq, heads, D]")
        return Replacement(
            cls=replacement_class(FusedRotary, cls),
            attributes={TABLES_ATTRIBUTE: self.tables, "rotary_wide": wide},
            note=", ".join(notes),
            sizes=functools.partial(_rotary_sizes, contract.mode, module),
            calls={"npu::npu_rotary_mul": contract.num_calls * contract.num_tensors},
        )

    def setup(self, model: nn.Module, replaced: Sequence[str]) -> RootSetup | None:
        if "" in replaced:
            return None  # the model is itself the attention module: there is no root above it
        self.tables.watch(model)
        return RootSetup(
            attributes={TABLES_ATTRIBUTE: self.tables},
            pre_hooks=(before_forward,),
            post_hooks=(after_forward,),
        )
