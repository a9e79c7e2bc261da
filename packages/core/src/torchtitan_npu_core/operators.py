"""The operator layer: one call, ``torch.ops.npu.*``, that runs on an NPU and everywhere else.

Where torch_npu imports, its operators are used, if their schemas allow the calls that converters
make, and only what it lacks is added: sharding rules, kernels for tensors outside the device, and a
derivative where gradients would be lost in silence.
Where it does not, the operators a plugin declares are defined here with the same schemas, as real
dispatcher operators: a kernel for any device, a fake kernel, an autograd formula or, for operators
without derivative on the device, a backward that raises, and a DTensor sharding rule.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from torchtitan_npu_core.compat import installed_version
from torchtitan_npu_core.discovery import PluginRecord
from torchtitan_npu_core.errors import NotDifferentiableError, OperatorVersionError
from torchtitan_npu_core.limits import enforce_limits, family_of
from torchtitan_npu_core.loading import PluginSet, declared_operators, discover_and_load
from torchtitan_npu_core.schemas import calls_misfit, fitting_versions
from torchtitan_npu_core.specs import OperatorSpec

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class OperatorKernels:
    """The implementation of one operator.

    Args:
        reference: Kernel for any device; takes the schema's arguments. Defines what is correct.
        fake: Same arguments; returns empty outputs of the right shape and dtype.
        check: Same arguments; raises ``OperatorArgumentError`` for what the device would refuse.
        measure: Same arguments; returns the quantities that device limits are about.
        setup_context: As ``torch.library.register_autograd`` takes it.
        backward: As ``torch.library.register_autograd`` takes it. None for an operator without
            derivative on the device: its backward then raises here.
        sharding: Function for ``torch.distributed.tensor.experimental.register_sharding``.
    """

    reference: Callable[..., Any]
    fake: Callable[..., Any]
    check: Callable[..., None]
    measure: Callable[..., Mapping[str, Any]]
    setup_context: Callable[..., None] | None = None
    backward: Callable[..., Any] | None = None
    sharding: Callable[..., Any] | None = None


@dataclass(frozen=True, kw_only=True)
class RegisteredOperator:
    """An operator that can be called.

    Args:
        spec: Its declaration.
        kernels: Our implementation of it.
        provider: ``"reference"`` if we defined it, ``"torch_npu"``, or ``"library"`` if somebody
            else did.
    """

    spec: OperatorSpec
    kernels: OperatorKernels
    provider: str


_registered: dict[str, RegisteredOperator] = {}
_libraries: dict[str, torch.library.Library] = {}


# ---------------------------------------------------------------- which backend


@functools.cache
def device_library_problem() -> str | None:
    """Import torch_npu if it is installed; say why it cannot be used, or None if it can.

    The answer is worked out once per process. An installed library that cannot be imported is
    reported once, as a warning.
    """
    if importlib.util.find_spec("torch_npu") is None:
        return "torch_npu is not installed"
    try:
        importlib.import_module("torch_npu")
    except Exception as error:
        problem = f"torch_npu is installed but cannot be imported: {type(error).__name__}: {error}"
        logger.warning("[converter] %s; reference kernels are used instead", problem)
        return problem
    return None


def device_family() -> str:
    """Family of the NPU in this machine, or an empty string without one."""
    if device_library_problem() is not None:
        return ""
    npu = torch.get_device_module("npu")
    return family_of(npu.get_device_name(0)) if npu.device_count() else ""


def existing_operator(name: str) -> Any:
    """The operator that a library other than ours has defined under this name, or None.

    For names of the ``npu`` namespace that library is torch_npu, which is imported if it can be; a
    vendor's own library defines names of its own namespace.
    """
    namespace, _, operator = name.partition("::")
    if namespace == "npu":
        device_library_problem()
    packet = getattr(getattr(torch.ops, namespace), operator, None)
    return None if packet is None else packet.default


# ---------------------------------------------------------------- registration


def load_kernels(spec: OperatorSpec) -> OperatorKernels:
    """Import the kernels a declaration names."""
    module_name, _, attribute = spec.kernels.partition(":")
    kernels = getattr(importlib.import_module(module_name), attribute)
    if not isinstance(kernels, OperatorKernels):
        raise TypeError(f"{spec.kernels} is a {type(kernels).__name__}, expected OperatorKernels")
    return kernels


def register_operator(spec: OperatorSpec) -> RegisteredOperator:
    """Make one operator callable. Doing it again changes nothing.

    Raises:
        ValueError: If another declaration of the same name has another schema.
        OperatorVersionError: If the device library's operator does not take the calls converters
            make, or torch_npu does not have the operator.
    """
    known = _registered.get(spec.name)
    if known is not None:
        if known.spec.schema != spec.schema:
            raise ValueError(
                f"operator {spec.name} is declared twice with different schemas: "
                f"{known.spec.schema} and {spec.schema}"
            )
        return known
    kernels = load_kernels(spec)
    existing = existing_operator(spec.name)
    provider = "reference"
    if existing is not None:
        provider = "torch_npu" if spec.name.startswith("npu::") else "library"
    problem = operator_misfit(spec)
    if problem is not None:
        fitting = fitting_versions(spec.name, spec.schema, spec.calls)
        raise OperatorVersionError(spec.name, problem, installed_version("torch_npu"), fitting)
    if existing is None:
        _define(spec, kernels)
    elif provider == "torch_npu":
        _complete(spec, kernels, existing)
    registered = RegisteredOperator(spec=spec, kernels=kernels, provider=provider)
    if kernels.sharding is not None:
        _add_sharding(spec, kernels.sharding)
    _registered[spec.name] = registered
    return registered


def operator_misfit(spec: OperatorSpec) -> str | None:
    """Say why the calls that converters make of an operator cannot be made here, or None."""
    existing = existing_operator(spec.name)
    if existing is not None:
        return calls_misfit(spec, str(existing._schema))
    # on a device, a reference kernel in place of an operator would be slow in silence
    lacking = spec.name.startswith("npu::") and device_library_problem() is None
    return "this release does not have the operator" if lacking else None


def _library(namespace: str) -> torch.library.Library:
    if namespace not in _libraries:
        _libraries[namespace] = torch.library.Library(namespace, "FRAGMENT")
    return _libraries[namespace]


def _checked(spec: OperatorSpec, kernels: OperatorKernels) -> Callable[..., Any]:
    """The reference kernel behind the argument checks and the device limits."""

    @functools.wraps(kernels.reference)
    def kernel(*args: Any, **kwargs: Any) -> Any:
        kernels.check(*args, **kwargs)
        enforce_limits(spec, kernels.measure(*args, **kwargs))
        return kernels.reference(*args, **kwargs)

    return kernel


def _backward(spec: OperatorSpec, kernels: OperatorKernels) -> Callable[..., Any]:
    """The declared derivative, or one that raises."""
    if kernels.backward is not None:
        return kernels.backward

    def backward(ctx: Any, *grads: Any) -> Any:
        raise NotDifferentiableError(spec.name)

    return backward


def _checked_fake(kernels: OperatorKernels) -> Callable[..., Any]:
    @functools.wraps(kernels.fake)
    def fake(*args: Any, **kwargs: Any) -> Any:
        kernels.check(*args, **kwargs)
        return kernels.fake(*args, **kwargs)

    return fake


def _define(spec: OperatorSpec, kernels: OperatorKernels) -> None:
    library = _library(spec.name.partition("::")[0])
    library.define(spec.schema, tags=(torch.Tag.pt2_compliant_tag,))
    torch.library.impl(spec.name, "default", _checked(spec, kernels), lib=library)
    torch.library.register_fake(spec.name, _checked_fake(kernels), lib=library)
    torch.library.register_autograd(
        spec.name, _backward(spec, kernels), setup_context=kernels.setup_context, lib=library
    )


def _complete(spec: OperatorSpec, kernels: OperatorKernels, existing: Any) -> None:
    """Add what torch_npu's operator lacks: tensors of the CPU, and derivatives.

    Where neither torch_npu nor the declaration has a derivative, backward raises; torch would warn
    and leave the gradient ``None``.
    """
    from torch._library.autograd import Info, make_autograd_impl

    has = functools.partial(torch._C._dispatch_has_kernel_for_dispatch_key, spec.name)
    if any(has(key) for key in ("CompositeImplicitAutograd", "CompositeExplicitAutograd")):
        return  # it is made of other operators
    library, base = _library("npu"), spec.name.partition("::")[2]
    if not has("CPU"):
        library.impl(base, _checked(spec, kernels), "CPU")
    if not has("Meta"):
        torch.library.register_fake(spec.name, _checked_fake(kernels), lib=library)
    derivative = Info(_backward(spec, kernels), kernels.setup_context)
    for key in ("AutogradCPU", "AutogradPrivateUse1"):
        if not has(key):
            library.impl(base, make_autograd_impl(existing, derivative), key, with_keyset=True)


def _add_sharding(spec: OperatorSpec, rule: Callable[..., Any]) -> None:
    """Tell DTensor how to shard the operator, unless something already has."""
    if not torch.distributed.is_available():
        return
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.experimental import register_sharding

    namespace, _, operator = spec.name.partition("::")
    overload = getattr(getattr(torch.ops, namespace), operator).default
    propagator = DTensor._op_dispatcher.sharding_propagator
    for table in ("op_to_rules", "op_strategy_funcs", "op_single_dim_strategy_funcs"):
        if overload in getattr(propagator, table, {}):
            return
    register_sharding(overload)(rule)


def declared_specs(plugins: PluginSet) -> dict[str, OperatorSpec]:
    """Operators of all loaded plugins, by name."""
    return {
        spec.name: spec for record in plugins.loaded for spec in declared_operators(plugins, record)
    }


def register_plugin_operators(
    plugins: PluginSet, record: PluginRecord, needed: Collection[str] | None = None
) -> list[RegisteredOperator]:
    """Make the operators of one plugin callable.

    Args:
        plugins: Loaded plugins.
        record: The plugin.
        needed: Operators that must be there; others that this torch_npu cannot offer are left out.
            All by default.

    Raises:
        OperatorVersionError: If one of them does not fit the installed torch_npu.
    """
    found = []
    for spec in declared_operators(plugins, record):
        try:
            found.append(register_operator(spec))
        except OperatorVersionError:
            if needed is None or spec.name in needed:
                raise
    return found


@functools.cache
def register_converter_operators(converter: str) -> None:
    """Make the operators of an installed converter's plugin callable, once per process.

    Raises:
        UnknownConverterError: If no usable plugin offers it any more.
    """
    from torchtitan_npu_core.registry import ConverterRegistry

    plugins = discover_and_load()
    offer = ConverterRegistry(plugins).get(converter)
    register_plugin_operators(plugins, offer.plugin, offer.spec.operators)


def registered_operators() -> dict[str, RegisteredOperator]:
    """Operators registered so far, by name."""
    return dict(_registered)
