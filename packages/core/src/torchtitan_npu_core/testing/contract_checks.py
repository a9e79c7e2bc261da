"""Checks of an ``OperatorCase`` against the device library, where that is loaded.

They need torch_npu alive, e.g. on a virtual NPU.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from torchtitan_npu_core.errors import NotDifferentiableError
from torchtitan_npu_core.testing.case_checks import described, require_grad
from torchtitan_npu_core.testing.checks import PromiseError
from torchtitan_npu_core.testing.operator_cases import DERIVATIVES, Call, OperatorCase


def check_schema(case: OperatorCase) -> None:
    """The declared schema is the device library's, letter by letter."""
    namespace = case.operator.partition("::")[0]
    declared = torch._C.parse_schema(f"{namespace}::{case.registered().spec.schema}")
    live = case.overload._schema
    if str(declared) != str(live):
        promise = f"{case.operator}: the declared schema is the device library's"
        raise PromiseError(promise, f"declared {declared}, there {live}")


def check_meta(case: OperatorCase, label: str) -> None:
    """The fake kernel gives what the device library's does, but for the differences listed."""
    reason = (case.fake_differences or {}).get(label)
    found = []
    for dtype in case.dtypes:
        call = case.call(label, dtype).to("meta")
        ours = _descriptions(case.implementation().fake, call)
        theirs = _descriptions(case.overload, call)
        if ours != theirs:
            found.append(f"{dtype}: {ours}, there {theirs}")
    if found and reason is None:
        promise = f"{case.operator}: its fake kernel gives what the device library's gives"
        raise PromiseError(promise, f"{label}, {'; '.join(found)}")
    if reason is not None and not found:
        promise = f"{case.operator}: a listed difference of the fake kernels exists"
        raise PromiseError(promise, f"{label}: {reason}")


def _descriptions(function: Callable[..., Any], call: Call) -> Any:
    try:
        with torch.no_grad():
            return [described(t) for t in call.run(function)]
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def check_derivative(case: OperatorCase) -> None:
    """Autograd does with the operator on the device what its class says."""
    found = observed_derivative(case)
    if found != case.derivative:
        promise = f"{case.operator}: its derivative is of class {case.derivative}"
        detail = f"{DERIVATIVES[case.derivative]}; found {found}, {DERIVATIVES[found]}"
        raise PromiseError(promise, detail)


def observed_derivative(case: OperatorCase) -> str:
    """Class of the derivative, from the dispatcher and one backward on fake device tensors."""
    key = torch._C._dispatch_has_kernel_for_dispatch_key(case.operator, "AutogradPrivateUse1")
    call = case.call(next(iter(case.inputs)), case.dtypes[0])

    def on_device(tensor: Tensor) -> Tensor:
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="npu")

    with FakeTensorMode(), warnings.catch_warnings():
        # class C warns: that is the only sign of the loss
        warnings.simplefilter("ignore")
        call = require_grad(call.map(on_device))
        outputs = [o for o in call.run(case.overload) if o.requires_grad]
        try:
            torch.autograd.backward([o.sum() for o in outputs])
        except NotDifferentiableError:
            return "C"  # this is ours, added because there was nothing
        except RuntimeError as error:
            if key and "is not implemented" in str(error):
                return "B"
            raise
    return "A" if any(t.grad is not None for t in call.floating) else "C"


CONTRACT_CHECKS: dict[str, Callable[..., None]] = {
    "schema": check_schema,
    "meta": check_meta,
    "derivative": check_derivative,
}
"""Checks for ``operator_checks`` in a process with the device library."""
