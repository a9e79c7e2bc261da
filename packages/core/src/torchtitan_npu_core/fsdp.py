"""Reduction of FSDP gradients where the backend has no premultiplied sum.

torchtitan sets a gradient divide factor of 1, which FSDP carries out as a premultiplied sum. Gloo
and HCCL refuse that; a plain sum gives the same numbers.
"""

from __future__ import annotations

from typing import Any

from torch import nn

_DONE_ATTRIBUTE = "_torchtitan_npu_sum_reduction"


def use_sum_reduction(model: nn.Module, args: Any, kwargs: Any) -> None:
    """Forward pre-hook of a root module: make its FSDP modules reduce with a plain sum, once.

    A module-level function, so that it survives the copies that pipeline parallelism makes.
    """
    # what: forces sum reduction on every FSDP module of this model
    # why:  ReduceOp.PREMUL_SUM is refused by gloo and by HCCL
    # ends: when torchtitan or FSDP2 does this itself for backends without premultiplied sums
    # test: tests/trainer/test_parallel.py::test_layout_equals_the_unconverted_run
    if _DONE_ATTRIBUTE in model.__dict__:
        return
    object.__setattr__(model, _DONE_ATTRIBUTE, True)
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
