"""Plugin system that lets a torchtitan job use Ascend NPU fused operators by name."""

from torchtitan_npu_core.__about__ import __version__
from torchtitan_npu_core.errors import ConverterError, OperatorArgumentError, OptionValueError
from torchtitan_npu_core.hookspecs import hookimpl
from torchtitan_npu_core.specs import (
    ConverterSpec,
    DeviceLimit,
    KnownIssue,
    OperatorSpec,
    OptionSpec,
)

__all__ = [
    "ConverterError",
    "ConverterSpec",
    "DeviceLimit",
    "KnownIssue",
    "OperatorArgumentError",
    "OperatorSpec",
    "OptionSpec",
    "OptionValueError",
    "__version__",
    "hookimpl",
]
