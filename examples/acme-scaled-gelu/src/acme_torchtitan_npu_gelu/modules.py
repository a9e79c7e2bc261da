"""The replacement module: what ``torch.nn.GELU(approximate="tanh")`` becomes."""

from __future__ import annotations

import torch
from torch import Tensor
from torchtitan_npu_core.swap import ReplacementMixin

SCALE_ATTRIBUTE = "acme_scale"
"""Plain attribute that a converted module keeps its factor in."""


class ScaledGELU(ReplacementMixin):
    """GELU on ``acme::scaled_gelu``. With a factor of 1.0 the same numbers as before.

    The unconverted module evaluates half inputs in float32 and rounds once; so does this.

    Source:
        Gaussian Error Linear Units (arXiv 1606.08415), section 2; torch.nn.GELU (torch 2.13.0).
    """

    torchtitan_npu_converter = "acme_scaled_gelu"
    torchtitan_npu_prefix = "Acme"
    acme_scale: float

    def forward(self, input: Tensor) -> Tensor:
        """Activate a tensor.

        Args:
            input: Any shape, float16, bfloat16 or float32.

        Returns:
            Shape and dtype of ``input``.

        Raises:
            OperatorArgumentError: For any other dtype.
        """
        return torch.ops.acme.scaled_gelu(input, self.acme_scale)

    def extra_repr(self) -> str:
        """What ``print(model)`` shows: the original's text and the factor."""
        return f"{super().extra_repr()}, scale={self.acme_scale}"  # type: ignore[misc]
