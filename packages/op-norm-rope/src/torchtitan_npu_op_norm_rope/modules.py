"""Replacement modules: what ``RMSNorm`` and rotary attention become."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from torchtitan_npu_core.swap import ReplacementMixin, rebind_globals
from torchtitan_npu_op_norm_rope.contract import RotaryContract, rotary_contract
from torchtitan_npu_op_norm_rope.tables import TABLES_ATTRIBUTE, RotaryTables

FP32_EPSILON = torch.finfo(torch.float32).eps
"""What ``torch.nn.functional.rms_norm`` uses for ``eps=None`` with float32 and half inputs."""


class FusedRMSNorm(ReplacementMixin):
    """RMSNorm on ``npu_rms_norm``. Same parameters, same names, same numbers.

    The unconverted module computes in float32, scale included, and rounds once to the input's
    dtype, for every pair of input and weight dtype; so does this.

    Source:
        torch.nn.RMSNorm (torch 2.13.0); op-plugin docs: torch_npu-npu_rms_norm.
    """

    torchtitan_npu_converter = "npu_rms_norm"
    normalized_shape: tuple[int, ...]
    eps: float | None
    weight: nn.Parameter | None

    def forward(self, x: Tensor) -> Tensor:
        """Normalise ``[..., *normalized_shape]``; returns shape and dtype of ``x``."""
        weight: Tensor | None = self.weight
        if weight is None:
            # the operator needs a scale; ones are exact
            weight = torch.ones(self.normalized_shape, dtype=x.dtype, device=x.device)
            weight = _like(weight, x)
        elif weight.dtype != x.dtype and weight.dtype != torch.float32:
            # the operator takes equal dtypes or a float32 scale; widening is exact
            weight = weight.float()
        epsilon = FP32_EPSILON if self.eps is None else self.eps
        return torch.ops.npu.npu_rms_norm(x, weight, epsilon)[0]


def _like(tensor: Tensor, other: Tensor) -> Tensor:
    """Replicate a plain tensor over the mesh of ``other`` if that is a DTensor."""
    from torch.distributed.tensor import DTensor, Replicate

    if isinstance(other, DTensor) and not isinstance(tensor, DTensor):
        mesh = other.device_mesh
        return DTensor.from_local(tensor, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return tensor


@dataclass(frozen=True, slots=True)
class RotaryArgument:
    """What a converted forward passes on in place of the model's table.

    Args:
        cache: The table the module was called with.
        tables: The model's shared tables.
        mode: ``interleave`` or ``half``.
        wide: Rotate in float32 and cast back.
        owner: The module whose forward this is.
    """

    cache: Tensor
    tables: RotaryTables
    mode: str
    wide: bool
    owner: nn.Module


def apply_rotary(argument: RotaryArgument, positions: Tensor | None, x: Tensor) -> Tensor:
    """Rotate one tensor.

    Args:
        argument: From the converted module's forward.
        positions: None, ``[1, L]`` or ``[B, L]``.
        x: ``[B, L, H, D]``.

    Returns:
        Shape and dtype of ``x``.

    Source:
        op-plugin docs: torch_npu-npu_rotary_mul.
    """
    dtype = torch.float32 if argument.wide else x.dtype
    cos, sin = argument.tables.lookup(argument.cache, positions, x.shape[1], dtype, argument.owner)
    cos, sin = _like(cos, x), _like(sin, x)
    wide_x = x.to(dtype)
    if cos.shape[0] > 1 and argument.mode == "interleave":
        # interleave mode broadcasts tables over batch and heads only: with tables per sample,
        # batch and sequence become one dim, which the operator takes
        y = torch.ops.npu.npu_rotary_mul(
            wide_x.flatten(0, 1), cos.flatten(0, 1), sin.flatten(0, 1), argument.mode
        ).view(x.shape)
    else:
        y = torch.ops.npu.npu_rotary_mul(wide_x, cos, sin, argument.mode)
    return y.to(x.dtype)


def _one(x: Tensor, cache: Any, positions: Tensor | None = None) -> Tensor:
    return apply_rotary(cache, positions, x)


def _two(q: Tensor, k: Tensor, cache: Any, positions: Tensor | None = None) -> Any:
    return apply_rotary(cache, positions, q), apply_rotary(cache, positions, k)


def _stand_in(contract: RotaryContract) -> Any:
    """A function with the parameter names the model's own function has."""
    plain = _one if contract.num_tensors == 1 else _two
    names = contract.parameters

    def rotary(*args: Any, **kwargs: Any) -> Any:
        return plain(*args, *[kwargs[name] for name in names[len(args) :] if name in kwargs])

    return rotary


class FusedRotary(ReplacementMixin):
    """A module whose forward rotates with ``npu_rotary_mul``.

    Its forward is the original's code with another function under the rotary function's name,
    local to this class; the Python module it came from is not touched.
    """

    torchtitan_npu_converter = "npu_rope"
    rotary_contract: RotaryContract
    rotary_wide: bool

    @classmethod
    def specialize(cls, original: type[nn.Module]) -> dict[str, Any]:
        """Class attributes of the replacement for one module class."""
        contract = rotary_contract(original)
        assert isinstance(contract, RotaryContract)
        forward = rebind_globals(
            original.forward,  # type: ignore[arg-type]
            {contract.function: _stand_in(contract)},
        )
        return {"rotary_contract": contract, "rotary_forward": staticmethod(forward)}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the original forward with tables in place of the model's own table."""
        contract = self.rotary_contract
        at, name = contract.cache_index, contract.cache_name
        cache = args[at] if at < len(args) else kwargs[name]
        argument = RotaryArgument(
            cache,
            getattr(self, TABLES_ATTRIBUTE),
            contract.mode,
            self.rotary_wide,
            self,  # type: ignore[arg-type]
        )
        if at < len(args):
            args = (*args[:at], argument, *args[at + 1 :])
        else:
            kwargs = {**kwargs, name: argument}
        return self.rotary_forward(self, *args, **kwargs)  # type: ignore[attr-defined]
