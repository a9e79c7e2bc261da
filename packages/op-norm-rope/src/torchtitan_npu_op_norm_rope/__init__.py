"""Fused RMS norm and rotary embedding for torchtitan on Ascend NPUs."""

from torchtitan_npu_op_norm_rope.__about__ import __version__

__all__ = ["__version__"]
