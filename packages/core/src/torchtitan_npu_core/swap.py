"""Replacement classes: the same module object, another class, local to that instance.

A replacement class is made from a mixin and the module's own class. It is cached, so that the same
pair always gives the same class, and instances pickle by that pair, so that a converted model can
be pickled and copied like any other although the class exists only at run time.
"""

from __future__ import annotations

import itertools
import sys
import types
from collections.abc import Mapping
from typing import Any

from torch import nn

_CLASSES: dict[tuple[type, type], type[nn.Module]] = {}
_NUMBERS = itertools.count()


class ReplacementMixin:
    """Base of every mixin that ``replacement_class`` combines with a module's own class.

    The class attributes tell who replaced the module and what it was. ``torchtitan_npu_prefix``
    begins the name of the replacement class; it should name the vendor.
    """

    torchtitan_npu_converter: str = ""
    torchtitan_npu_prefix: str = "NPU"
    torchtitan_npu_original: type[nn.Module]
    torchtitan_npu_mixin: type

    def __reduce_ex__(self, protocol: Any) -> Any:
        reduced = super().__reduce_ex__(protocol)
        cls = type(self)
        key = (
            cls.__dict__.get("torchtitan_npu_mixin"),
            cls.__dict__.get("torchtitan_npu_original"),
        )
        # a class that something else derived from ours (FSDP does) has its own rules
        if _CLASSES.get(key) is not cls:  # type: ignore[arg-type]
            return reduced
        return (_new_instance, key, *reduced[2:])


def _new_instance(mixin: type[ReplacementMixin], original: type[nn.Module]) -> nn.Module:
    """What copying and unpickling call, the latter in a process that may have converted nothing."""
    converter = mixin.torchtitan_npu_converter
    if converter and (mixin, original) not in _CLASSES:
        from torchtitan_npu_core.operators import register_converter_operators

        register_converter_operators(converter)
    cls = replacement_class(mixin, original)
    return cls.__new__(cls)


def replacement_class(mixin: type, original: type[nn.Module]) -> type[nn.Module]:
    """Return the class that adds ``mixin`` to ``original``, e.g. ``NPURMSNorm`` of ``RMSNorm``.

    Args:
        mixin: Subclass of ``ReplacementMixin``. It may define ``specialize(original)``, a class
            method that returns further attributes for the new class.
        original: Class of the module to be replaced.
    """
    key = (mixin, original)
    cls = _CLASSES.get(key)
    if cls is None:
        namespace: dict[str, Any] = {
            "__module__": mixin.__module__,
            "__doc__": mixin.__doc__,
            "torchtitan_npu_original": original,
            "torchtitan_npu_mixin": mixin,
        }
        specialize = getattr(mixin, "specialize", None)
        if specialize is not None:
            namespace.update(specialize(original))
        prefix = getattr(mixin, "torchtitan_npu_prefix", "NPU")
        cls = type(f"{prefix}{original.__name__}", (mixin, original), namespace)
        _CLASSES[key] = cls
    return cls


def replaced_from(module: nn.Module) -> tuple[str, type[nn.Module]] | None:
    """Say which converter replaced a module and what class it had, or None if it is original.

    Classes that only supply what a CPU lacks belong to no converter and count as original.
    """
    cls: Any = type(module)
    if issubclass(cls, ReplacementMixin) and cls.torchtitan_npu_converter:
        return cls.torchtitan_npu_converter, cls.torchtitan_npu_original
    return None


def rebind_globals(function: types.FunctionType, names: Mapping[str, Any]) -> types.FunctionType:
    """Return a function with the same code that sees other values for some global names.

    The function's module is not touched: the copy has a globals mapping of its own. This is how
    one class of instances gets another implementation of a function that its forward looks up in
    its module, while every other user of that module keeps the original.

    Args:
        function: A plain Python function.
        names: Global names to replace, with their new values.

    Raises:
        TypeError: If ``function`` is not a plain function, e.g. because something wrapped it.
        ValueError: If the code does not use one of the names.
    """
    if not isinstance(function, types.FunctionType):
        raise TypeError(f"cannot rebind globals of a {type(function).__name__}")
    for name in names:
        if name not in function.__code__.co_names:
            raise ValueError(f"{function.__qualname__} does not use the global {name!r}")
    # A tracer (torch.compile) finds a function's globals by importing the module they name, so the
    # new globals are those of a module of their own, under a name of ours.
    module = types.ModuleType(
        f"torchtitan_npu_core.rebound.{function.__module__}.{function.__qualname__}.{next(_NUMBERS)}"
    )
    module.__dict__.update({**function.__globals__, **names, "__name__": module.__name__})
    sys.modules[module.__name__] = module
    copy = types.FunctionType(
        function.__code__,
        module.__dict__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    copy.__annotations__ = function.__annotations__
    copy.__qualname__ = function.__qualname__
    copy.__doc__ = function.__doc__
    copy.__module__ = function.__module__
    return copy
