"""The converters of this package: what they claim, and why they refuse."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from torchtitan_npu_core.plan import Converter, Replacement, RootSetup, Skip
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
        sizes: dict[str, int] = {}
        for attribute in ("qk_rope_head_dim", "head_dim"):
            if isinstance(getattr(module, attribute, None), int):
                sizes["head_dim"] = getattr(module, attribute)
                break
        if isinstance(getattr(module, "n_heads", None), int):
            sizes["num_heads"] = module.n_heads  # type: ignore[assignment]
        return Replacement(
            cls=replacement_class(FusedRotary, cls),
            attributes={TABLES_ATTRIBUTE: self.tables, "rotary_wide": wide},
            note=", ".join(notes),
            sizes={"npu::npu_rotary_mul": sizes},
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
