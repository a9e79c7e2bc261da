"""Cases: one declaration per operator, from which all proofs about it follow."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from torchtitan_npu_core.operators import OperatorKernels, RegisteredOperator
from torchtitan_npu_core.testing.checks import registered_operator

DERIVATIVES = {
    "A": "the operator has a derivative",
    "B": "backward raises",
    "C": "no autograd key: gradients are lost with a warning",
}


class Call:
    """Arguments of one call of an operator: ``Call(x, gamma, epsilon=1e-5)``."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.args = args
        self.kwargs = kwargs

    def run(self, function: Callable[..., Any]) -> tuple[Tensor, ...]:
        """Call a function; return the tensors it gives, those in lists included."""
        return tuple(pytree.tree_leaves(function(*self.args, **self.kwargs)))

    def map(self, function: Callable[[Tensor], Tensor]) -> Call:
        """The same call with another tensor for each, those in lists included."""
        args, kwargs = pytree.tree_map_only(Tensor, function, (self.args, self.kwargs))
        return Call(*args, **kwargs)

    def to(self, device: str) -> Call:
        """The same call on a device; tensors keep whether they require grad, on meta strides."""

        def move(tensor: Tensor) -> Tensor:
            if device == "meta":
                moved = torch.empty_strided(
                    tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta"
                )
            else:
                moved = tensor.detach().to(device)
            return moved.requires_grad_(tensor.requires_grad)

        return self.map(move)

    @property
    def floating(self) -> list[Tensor]:
        """Its floating-point tensors in the order of the arguments."""
        leaves = pytree.tree_leaves((self.args, self.kwargs))
        return [t for t in leaves if isinstance(t, Tensor) and t.is_floating_point()]

    def with_floating(self, tensors: Sequence[Tensor]) -> Call:
        """The same call with other floating-point tensors."""
        rest = iter(tensors)
        return self.map(lambda t: next(rest) if t.is_floating_point() else t)


@dataclass(frozen=True, kw_only=True)
class Mutation:
    """A wrong variant of an operator that a check has to notice.

    Args:
        name: What is wrong.
        caught_by: Name of the check that must fail, a key of ``CHECKS``.
        kernels: Fields of the operator's ``OperatorKernels`` to put something wrong into.
    """

    name: str
    caught_by: str
    kernels: Mapping[str, Callable[..., Any]]


@dataclass(frozen=True, kw_only=True)
class OperatorCase:
    """What an operator has to do, said apart from its implementation.

    Args:
        operator: Qualified name of an operator that an installed plugin declares.
        inputs: Makes a ``Call`` for a dtype, by label. Torch's seed is set before. Cover layouts,
            odd sizes, non-contiguous and empty tensors; keep them small.
        dtypes: Dtypes of the calls that the operator takes.
        formula: Takes the arguments, returns all outputs in float64 (integers in any type).
            Written apart from the reference kernel, e.g. with plain loops.
        gradients: Takes the gradients of the differentiable outputs as a tuple, then the
            arguments; returns a float64 gradient, or None, for every floating-point tensor among
            them. Only for an operator with a derivative.
        differentiable: Positions of the outputs that have a gradient.
        derivative: ``"A"``, ``"B"`` or ``"C"``, see ``DERIVATIVES``: what autograd does with the
            operator on the device. Without derivative, backward has to raise here.
        stock: The same in plain PyTorch, differentiable outputs only. In 16-bit dtypes the operator
            may have at most twice its error.
        budget: Largest error for 16-bit dtypes, in units in the last place of the result. A result
            that is rounded once is half a unit off.
        fake_differences: Labels where the fake kernel gives something else than the device
            library's, each with the reason.
        mutations: Wrong variants that the checks have to notice.
        kernels: Implementation under test; the registered one by default.
    """

    operator: str
    inputs: Mapping[str, Callable[[torch.dtype], Call]]
    dtypes: Sequence[torch.dtype]
    formula: Callable[..., Any]
    gradients: Callable[..., Sequence[Tensor | None]] | None = None
    differentiable: tuple[int, ...] = (0,)
    derivative: str = "A"
    stock: Callable[..., Any] | None = None
    budget: float = 0.5
    fake_differences: Mapping[str, str] | None = None
    mutations: Sequence[Mutation] = ()
    kernels: OperatorKernels | None = None

    def __post_init__(self) -> None:
        if self.derivative not in DERIVATIVES:
            raise ValueError(f"{self.operator}: derivative is {self.derivative!r}, not A, B or C")
        if (self.derivative == "A") != (self.gradients is not None):
            raise ValueError(f"{self.operator}: gradients are for derivative 'A', and needed there")
        unknown = set(self.fake_differences or ()) - set(self.inputs)
        if unknown:
            raise ValueError(f"{self.operator}: fake_differences of unknown labels {unknown}")

    @property
    def base(self) -> str:
        """Name of the operator without its namespace."""
        return self.operator.partition("::")[2]

    @property
    def overload(self) -> Any:
        """The dispatcher's operator; the plugin that declares it is asked to define it."""
        if self.kernels is None:
            self.registered()
        namespace, _, base = self.operator.partition("::")
        return getattr(getattr(torch.ops, namespace), base).default

    def registered(self) -> RegisteredOperator:
        """The declared operator, made callable."""
        return registered_operator(self.operator)

    def implementation(self) -> OperatorKernels:
        """Reference kernel, fake kernel and the rest."""
        return self.kernels or self.registered().kernels

    def call(self, label: str, dtype: torch.dtype) -> Call:
        """Arguments of one label, the same ones every time."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return self.inputs[label](dtype)
