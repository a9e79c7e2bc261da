"""Checks of what every converter and every operator promises. Each failure names the promise."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from torchtitan_npu_core.apply import convert_model
from torchtitan_npu_core.loading import PluginSet, discover_and_load
from torchtitan_npu_core.operators import (
    RegisteredOperator,
    declared_operators,
    declared_specs,
    register_operator,
    register_plugin_operators,
    registered_operators,
)
from torchtitan_npu_core.plan import plan_conversion
from torchtitan_npu_core.probe import OperatorProbe
from torchtitan_npu_core.registry import ConverterRegistry, Offer

Inputs = Callable[[], Sequence[Any]]


class PromiseError(AssertionError):
    """A converter breaks a promise.

    Args:
        promise: The promise, as a sentence.
        detail: What was seen.
    """

    def __init__(self, promise: str, detail: str = "") -> None:
        self.promise = promise
        super().__init__(f"promise broken: {promise}" + (f" ({detail})" if detail else ""))


def _promise(holds: bool, promise: str, detail: str = "") -> None:
    if not holds:
        raise PromiseError(promise, detail)


def check_converter(
    name: str,
    *,
    model: Callable[[], nn.Module],
    inputs: Inputs,
    rtol: float = 1e-5,
    atol: float = 1e-6,
    section: dict[str, Any] | None = None,
) -> None:
    """Check everything a converter promises on one small float32 model.

    Args:
        name: Converter name; its distribution must be installed.
        model: Makes the model. It is called several times and must give equal models when torch's
            seed is equal.
        inputs: Makes the positional inputs of its forward.
        rtol: Relative tolerance of outputs and gradients.
        atol: Absolute tolerance of outputs and gradients.
        section: Contents of an ``[npu]`` section.

    Raises:
        PromiseError: Naming the first promise that is broken.
    """
    plugins = discover_and_load()
    registry = ConverterRegistry(plugins)
    offer = registry.get(name)
    name = offer.spec.name
    options = registry.settings(section).options
    _check_lists_without_torch(name)
    _check_names_exist(offer, plugins)

    def make() -> nn.Module:
        torch.manual_seed(0)
        return model()

    stock, converted, bystander = make(), make(), make()
    bystander_class = {n: type(m) for n, m in bystander.named_modules()}
    before = _snapshot(converted)
    result = convert_model(converted, [name], section=section, plugins=plugins)
    _promise(bool(result.replaced[name]), "it replaces at least one module")
    _check_unchanged(before, converted)
    _promise(
        {n: type(m) for n, m in bystander.named_modules()} == bystander_class,
        "another model of the same classes stays as it was",
    )
    _check_numbers(stock, converted, inputs, rtol, atol)
    _check_numbers(stock, bystander, inputs, 0.0, 0.0)
    _check_operators_run(converted, inputs, result.calls_per_forward)
    again = convert_model(converted, [name], section=section, plugins=plugins)
    _promise(again.num_replaced == 0, "converting twice equals converting once")
    _check_numbers(stock, copy.deepcopy(converted), inputs, rtol, atol)
    _check_on_meta(make, offer, result.replaced[name], section, options)


def _check_lists_without_torch(name: str) -> None:
    code = (
        "import sys, json\n"
        "from torchtitan_npu_core.loading import discover_and_load\n"
        "from torchtitan_npu_core.registry import ConverterRegistry\n"
        "names = ConverterRegistry(discover_and_load()).names\n"
        "print(json.dumps([names, 'torch' in sys.modules]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    _promise(done.returncode == 0, "it lists in a process of its own", done.stderr)
    names, torch_loaded = json.loads(done.stdout.splitlines()[-1])
    _promise(name in names, "it is listed", f"listed: {names}")
    _promise(not torch_loaded, "it lists without importing torch")


def _check_names_exist(offer: Offer, plugins: PluginSet) -> None:
    plan_conversion(nn.Module(), [offer])  # imports the factory
    declared = {spec.name for spec in declared_operators(plugins, offer.plugin)}
    registered = [register_operator(s) for s in declared_operators(plugins, offer.plugin)]
    _promise(len(registered) == len(declared), "its operators are declared once each")
    for operator in offer.spec.operators:
        namespace, _, base = operator.partition("::")
        _promise(
            hasattr(getattr(torch.ops, namespace), base), "its declared operators exist", operator
        )


def _snapshot(model: nn.Module) -> dict[str, Any]:
    return {
        "keys": list(model.state_dict()),
        "parameters": [(n, id(p), p.requires_grad, p.clone()) for n, p in model.named_parameters()],
        "training": [(n, m.training) for n, m in model.named_modules()],
        "modules": [(n, id(m)) for n, m in model.named_modules()],
    }


def _check_unchanged(before: dict[str, Any], model: nn.Module) -> None:
    after = _snapshot(model)
    _promise(before["keys"] == after["keys"], "state-dict keys and their order stay")
    for (n, i, r, v), (n2, i2, r2, v2) in zip(
        before["parameters"], after["parameters"], strict=True
    ):
        _promise(
            (n, i, r) == (n2, i2, r2), "parameters are the same objects with the same names", n
        )
        _promise(v.is_meta or torch.equal(v, v2), "parameter values stay", n)
    _promise(before["training"] == after["training"], "training flags and module names stay")
    _promise(before["modules"] == after["modules"], "modules stay the same objects")


def _run(model: nn.Module, inputs: Inputs) -> tuple[list[Tensor], dict[str, Tensor | None]]:
    torch.manual_seed(1)
    arguments = [
        a.detach().clone().requires_grad_()
        if isinstance(a, Tensor) and a.is_floating_point()
        else a
        for a in inputs()
    ]
    model.zero_grad(set_to_none=True)
    output = model(*arguments)
    outputs = [output] if isinstance(output, Tensor) else list(output)
    torch.manual_seed(2)
    torch.stack([(o * torch.randn_like(o)).sum() for o in outputs]).sum().backward()
    gradients = {n: p.grad for n, p in model.named_parameters()}
    gradients |= {f"input {i}": a.grad for i, a in enumerate(arguments) if isinstance(a, Tensor)}
    return [o.detach() for o in outputs], gradients


def _close(a: Tensor, b: Tensor, rtol: float, atol: float) -> bool:
    return torch.allclose(a.double(), b.double(), rtol=rtol, atol=atol)


def _check_numbers(
    stock: nn.Module, other: nn.Module, inputs: Inputs, rtol: float, atol: float
) -> None:
    want, want_grads = _run(stock, inputs)
    got, got_grads = _run(other, inputs)
    _promise(len(want) == len(got), "outputs stay")
    for a, b in zip(want, got, strict=True):
        _promise(a.dtype == b.dtype and a.shape == b.shape, "dtype and shape of outputs stay")
        _promise(
            _close(a, b, rtol, atol), "outputs stay", f"largest difference {(a - b).abs().max()}"
        )
    for key, a in want_grads.items():
        b = got_grads[key]
        _promise((a is None) == (b is None), "every gradient stays", key)
        if a is not None and b is not None:
            detail = f"{key}, largest difference {(a - b).abs().max()}"
            _promise(_close(a, b, rtol, atol), "every gradient stays", detail)


def _check_operators_run(model: nn.Module, inputs: Inputs, calls: dict[str, int]) -> None:
    namespaces = sorted({name.partition("::")[0] for name in calls})
    with torch.no_grad(), OperatorProbe(namespaces) as probe:
        model(*inputs())
    seen = {name: probe.counts[name] for name in calls}
    _promise(seen == calls, "the operators it announces really run", f"{calls} vs {seen}")


def _check_on_meta(
    make: Callable[[], nn.Module],
    offer: Offer,
    replaced: list[str],
    section: dict[str, Any] | None,
    options: Mapping[str, Mapping[str, Any]],
) -> None:
    name = offer.spec.name
    with torch.device("meta"):
        shadow = make()
    before = _snapshot(shadow)
    rows = plan_conversion(shadow, [offer], options).rows_of(name, "replaced")
    _check_unchanged(before, shadow)
    _promise([r.fqn for r in rows] == replaced, "planning on meta finds the same modules")
    convert_model(shadow, [name], section=section)
    _check_unchanged(before, shadow)


def check_operator(name: str, *args: Any, **kwargs: Any) -> None:
    """Run ``torch.library.opcheck`` on a declared operator.

    Args:
        name: Qualified name of an operator that an installed plugin declares.
        args: Sample arguments.
        kwargs: Sample keyword arguments.
    """
    registered_operator(name)
    namespace, _, base = name.partition("::")
    torch.library.opcheck(getattr(getattr(torch.ops, namespace), base).default, args, kwargs)


def registered_operator(name: str) -> RegisteredOperator:
    """Make an operator callable that an installed plugin declares, and that plugin's others.

    Raises:
        PromiseError: If no loaded plugin declares it.
    """
    known = registered_operators().get(name)
    if known is not None:
        return known
    plugins = discover_and_load()
    declared = declared_specs(plugins)
    if name not in declared:
        problems = "; ".join(plugins.problems)
        detail = f"{name!r}, declared: {', '.join(sorted(declared))}. {problems}"
        raise PromiseError("the operator is declared by a loaded plugin", detail)
    for record in plugins.loaded:
        # its derivative calls another one
        if name in {spec.name for spec in declared_operators(plugins, record)}:
            register_plugin_operators(plugins, record)
    return registered_operators()[name]
