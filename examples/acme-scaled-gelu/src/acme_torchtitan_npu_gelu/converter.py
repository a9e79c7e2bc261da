"""The converter of this package: what it claims, and why it refuses."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import nn
from torchtitan_npu_core import OptionValueError
from torchtitan_npu_core.plan import Converter, Replacement, Skip
from torchtitan_npu_core.swap import replacement_class

from acme_torchtitan_npu_gelu.modules import SCALE_ATTRIBUTE, ScaledGELU


class ScaledGELUConverter(Converter):
    """Replaces ``torch.nn.GELU(approximate="tanh")``.

    Args:
        options: ``scale``, the factor on the activation.

    Raises:
        OptionValueError: If ``scale`` is infinite or not a number.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        super().__init__(options)
        self.scale = self.options["scale"]
        # TOML can say inf and nan, and both are floats
        if not math.isfinite(self.scale):
            raise OptionValueError("npu.acme_scaled_gelu", "scale", self.scale, "a finite number")

    def claim(self, fqn: str, module: nn.Module, model: nn.Module) -> Replacement | Skip | None:
        """Claim a GELU whose class, forward and attributes say that it is the tanh form."""
        cls = type(module)
        if not isinstance(module, nn.GELU):
            return None
        # a subclass is the same mathematics only if it left the forward alone
        if cls.forward is not nn.GELU.forward:
            return Skip(f"{cls.__name__} has a forward of its own, with other mathematics")
        if "forward" in module.__dict__:
            return Skip("its forward was replaced on the instance")
        if module.approximate != "tanh":
            return Skip(
                f"approximate is {module.approximate!r}, the operator computes the 'tanh' form only"
            )
        changed = self.scale != 1.0
        return Replacement(
            cls=replacement_class(ScaledGELU, cls),
            attributes={SCALE_ATTRIBUTE: self.scale},
            note=f"scale {self.scale} changes the mathematics" if changed else "",
            calls={"acme::scaled_gelu": 1},
        )
