"""Checks of an ``OperatorCase`` against the operator. Each failure names operator and label."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from torchtitan_npu_core.errors import NotDifferentiableError
from torchtitan_npu_core.testing.checks import PromiseError
from torchtitan_npu_core.testing.operator_cases import Call, OperatorCase

_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5}
_BACKWARD_SEED = 1


class _Checking:
    """Raise errors that say which operator and which call are meant."""

    def __init__(self, case: OperatorCase, label: str, dtype: torch.dtype | None = None) -> None:
        self.operator = case.operator
        self.where = label if dtype is None else f"{label}, {str(dtype).removeprefix('torch.')}"

    def holds(self, condition: Any, promise: str, detail: str = "") -> None:
        if not condition:
            raise PromiseError(f"{self.operator}: {promise}", f"{self.where}: {detail}")

    def close(self, got: Tensor, want: Tensor, tolerance: float, promise: str) -> None:
        try:
            torch.testing.assert_close(
                got.detach().cpu(), want.detach().cpu(), rtol=tolerance, atol=tolerance,
                equal_nan=True, check_dtype=False,
            )  # fmt: skip
        except AssertionError as error:
            self.holds(False, promise, str(error))


@contextmanager
def no_limits() -> Iterator[None]:
    # which families take a call is no subject here
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".* would be refused on device family")
        yield


def _formula(case: OperatorCase, call: Call) -> tuple[Tensor, ...]:
    # on the CPU wherever the call is: formulas are plain loops
    with torch.device("cpu"), torch.no_grad():
        return call.to("cpu").run(case.formula)


def require_grad(call: Call, asked: Sequence[int] | None = None) -> Call:
    """The same call, with gradients wanted for all floating-point tensors or for some."""
    return call.with_floating(
        [
            t.detach().requires_grad_(asked is None or i in asked)
            for i, t in enumerate(call.floating)
        ]
    )


def _backward(
    function: Callable[..., Any], call: Call
) -> tuple[tuple[Tensor, ...], list[Tensor | None], tuple[Tensor, ...]]:
    """Outputs, gradients of the floating-point arguments, and what the backward started from."""
    outputs = call.run(function)
    starts = [o for o in outputs if o.requires_grad]
    generator = torch.Generator("cpu").manual_seed(1)
    begin = tuple(
        torch.randn(o.shape, generator=generator, device="cpu").to(o.device, o.dtype)
        for o in starts
    )
    wanted = [t for t in call.floating if t.requires_grad]
    found = iter(torch.autograd.grad(starts, wanted, begin, allow_unused=True))
    return outputs, [next(found) if t.requires_grad else None for t in call.floating], begin


def _true_gradients(
    case: OperatorCase, begin: tuple[Tensor, ...], call: Call
) -> Sequence[Tensor | None]:
    assert case.gradients is not None
    with torch.device("cpu"), torch.no_grad():
        host = call.to("cpu")
        return case.gradients(tuple(b.cpu() for b in begin), *host.args, **host.kwargs)


def _differentiable(outputs: Sequence[Tensor]) -> tuple[int, ...]:
    return tuple(i for i, o in enumerate(outputs) if o.requires_grad)


# ---------------------------------------------------------------- numbers


def check_formula(case: OperatorCase, label: str) -> None:
    """Outputs are what the formula says, in float64 and in float32."""
    for dtype in (torch.float64, *(d for d in case.dtypes if d == torch.float32)):
        checking, call = _Checking(case, label, dtype), case.call(label, dtype)
        # devices take no float64, the reference kernel does
        function = case.implementation().reference if dtype == torch.float64 else case.overload
        with no_limits(), torch.no_grad():
            got = call.run(function)
        want = _formula(case, call)
        checking.holds(len(got) == len(want), f"it has {len(want)} outputs", f"{len(got)}")
        for i, (a, b) in enumerate(zip(got, want, strict=True)):
            checking.close(a, b, _TOLERANCE[dtype], f"output {i} is what the formula says")


def check_gradients(case: OperatorCase, label: str) -> None:
    """Autograd gives the gradients of the formula, for all inputs together and for each alone.

    An operator without derivative has to raise in backward.
    """
    dtype = torch.float32 if torch.float32 in case.dtypes else case.dtypes[0]
    checking, call = _Checking(case, label, dtype), case.call(label, dtype)
    if case.gradients is None:
        _check_backward_raises(case, checking, require_grad(call))
        return
    every = range(len(call.floating))
    want: Sequence[Tensor | None] = ()
    for asked in (every, *([i] for i in every if len(every) > 1)):
        if len(asked) == 1 and want and want[asked[0]] is None:
            continue  # an input without derivative
        with no_limits():
            outputs, got, begin = _backward(case.overload, require_grad(call, asked))
        found = _differentiable(outputs)
        checking.holds(found == case.differentiable, "its outputs have gradients", str(found))
        want = want or _true_gradients(case, begin, call)
        for i in asked:
            a, b, what = got[i], want[i], f"the gradient of input {i} is what the formula says"
            checking.holds((a is None) == (b is None), what, f"{a} instead of {b}")
            if a is not None and b is not None:
                checking.holds(a.dtype == call.floating[i].dtype, what, f"it is {a.dtype}")
                checking.close(a, b, _TOLERANCE[torch.float32], what)


def _check_backward_raises(case: OperatorCase, checking: _Checking, call: Call) -> None:
    with no_limits():
        outputs = call.run(case.overload)
    try:
        torch.autograd.backward([o.sum() for o in outputs if o.requires_grad])
    except NotDifferentiableError:
        return
    checking.holds(False, "its backward raises, so that no gradient is lost in silence")


def check_gradient_formula(case: OperatorCase, label: str) -> None:
    """The formula of the gradients is the derivative of the formula, by finite differences."""
    call = case.call(label, torch.float64).to("cpu")

    class Formula(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *tensors: Tensor) -> Any:
            ctx.save_for_backward(*tensors)
            outputs = call.with_floating(tensors).run(case.formula)
            return tuple(outputs[i] for i in case.differentiable)

        @staticmethod
        def backward(ctx: Any, *begin: Tensor) -> Any:
            return tuple(_true_gradients(case, begin, call.with_floating(ctx.saved_tensors)))

    inputs = tuple(t.detach().double().contiguous().requires_grad_() for t in call.floating)
    try:
        with torch.device("cpu"):
            torch.autograd.gradcheck(Formula.apply, inputs, fast_mode=True)
    except RuntimeError as error:
        _Checking(case, label).holds(
            False, "the formula of the gradients is the derivative of the formula", str(error)
        )


# ---------------------------------------------------------------- precision


_HALF = (torch.float16, torch.bfloat16)


def check_precision(case: OperatorCase, label: str, dtypes: Sequence[torch.dtype] = _HALF) -> None:
    """Outputs and gradients are within the budget (16-bit dtypes), and as exact as stock's.

    In float32 the comparison with stock is fair only if both compute alike: it is left out by
    default.
    """
    for dtype in (d for d in case.dtypes if d in dtypes):
        checking, call = _Checking(case, label, dtype), case.call(label, dtype)
        got, truth = _results(case, call)
        stock = _stock_results(case, call)
        for name, value in got.items():
            want, eps = truth[name], torch.finfo(value.dtype).eps
            value = value.detach().double().cpu()
            checking.holds(
                torch.equal(value.isnan(), want.isnan()), f"{name} is NaN where the formula is"
            )
            value, want = value.nan_to_num(), want.nan_to_num()
            if dtype in _HALF:
                units = _units_off(value, want, eps)
                checking.holds(units <= case.budget, f"{name} is within its budget", f"{units:.2f}")
            if name in stock:
                error = float((value - want).norm())
                allowed = 2 * float((stock[name].double().cpu() - want).norm())
                allowed += eps / 100 * float(want.norm())
                detail = f"{error:.2g} is more than {allowed:.2g}"
                checking.holds(error <= allowed, f"{name} is as exact as stock's", detail)


def _named(
    outputs: Mapping[int, Tensor], gradients: Sequence[Tensor | None] = ()
) -> dict[str, Tensor]:
    named = {f"output {i}": t for i, t in outputs.items() if t.is_floating_point()}
    return named | {f"gradient {i}": t for i, t in enumerate(gradients) if t is not None}


def _results(case: OperatorCase, call: Call) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Outputs and gradients of the operator by name, and those of the formulas."""
    want = dict(enumerate(_formula(case, call)))
    with no_limits():
        if case.gradients is None:
            with torch.no_grad():
                return _named(dict(enumerate(call.run(case.overload)))), _named(want)
        outputs, gradients, begin = _backward(case.overload, require_grad(call))
    return (
        _named(dict(enumerate(outputs)), gradients),
        _named(want, _true_gradients(case, begin, call)),
    )


def _stock_results(case: OperatorCase, call: Call) -> dict[str, Tensor]:
    if case.stock is None:
        return {}
    if case.gradients is None:
        return _named(dict(zip(case.differentiable, call.run(case.stock), strict=True)))
    outputs, gradients, _ = _backward(case.stock, require_grad(call))
    positions = dict(zip(case.differentiable, (o.detach() for o in outputs), strict=True))
    return _named(positions, gradients)


def _units_off(got: Tensor, truth: Tensor, eps: float) -> float:
    """Largest error in units in the last place, beyond what float32 leaves of cancelling sums."""
    if truth.numel() == 0:
        return 0.0
    unit = torch.ldexp(torch.full_like(truth, eps), truth.frexp().exponent - 1)
    noise = 32 * torch.finfo(torch.float32).eps * truth.abs().max()
    return float((((got - truth).abs() - noise).clamp_min(0) / unit).max())


# ---------------------------------------------------------------- what the dispatcher needs


def described(tensor: Tensor) -> tuple[Any, ...]:
    """Shape, dtype and the strides that mean something."""
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    strides = tuple(s for n, s in pairs if n > 1) if tensor.numel() else ()
    return tuple(tensor.shape), tensor.dtype, strides


def check_fake(case: OperatorCase, label: str) -> None:
    """The fake kernel gives as many outputs as the kernel, of the same shapes, dtypes, strides."""
    kernels = case.implementation()
    for dtype in case.dtypes:
        call = case.call(label, dtype)
        with torch.no_grad():
            real = [described(t) for t in call.run(kernels.reference)]
            fake = [described(t) for t in call.to("meta").run(kernels.fake)]
        promise = "its fake kernel describes what its kernel returns"
        _Checking(case, label, dtype).holds(real == fake, promise, f"{fake}, really {real}")


def check_opcheck(case: OperatorCase, label: str) -> None:
    """``torch.library.opcheck`` has nothing to say."""
    dtype = torch.float32 if torch.float32 in case.dtypes else case.dtypes[0]
    call = case.call(label, dtype)
    tests = ("test_schema", "test_faketensor", "test_autograd_registration")
    if case.gradients is not None:
        call = require_grad(call)
    with no_limits():
        plain = [t.detach() for t in call.run(case.overload)]
        asks = case.gradients is None and any(t.requires_grad for t in call.floating)
        if not asks and not any(t.isnan().any() for t in plain):
            # it runs backward where an input wants a gradient, and takes no NaN for equal
            tests += ("test_aot_dispatch_dynamic",)
        try:
            torch.library.opcheck(case.overload, call.args, call.kwargs, test_utils=tests)
        except Exception as error:
            _Checking(case, label, dtype).holds(False, "opcheck accepts it", str(error))
