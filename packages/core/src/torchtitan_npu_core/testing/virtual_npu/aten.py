"""Kernels for device ``npu``: the CPU's, on the same memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from torchtitan_npu_core.testing.virtual_npu import random
from torchtitan_npu_core.testing.virtual_npu.memory import device, host, poison, raw_empty

aten = torch.ops.aten

# torch_npu's own kernels, which only look after storages
_KEPT = {
    "resize_",
    "set_.source_Storage_storage_offset",
    "set_.source_Storage",
    "set_",
    "set_.source_Tensor",
    "record_stream",
    "is_pinned",
    "_pin_memory",
    "pin_memory",
}

# torch_npu's kernels for these go to CANN without passing the dispatcher; torch's own are made of
# other operators
_COMPOSITE = ("one_hot", "fill_diagonal_", "slogdet")

# indices may be on the CPU, as on every device
_INDEXED = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"}


# ---------------------------------------------------------------- operators without a CPU twin


def _nothing() -> Tensor:
    return torch.empty(0)


def matmul_backward(grad: Tensor, a: Tensor, b: Tensor, mask: list[bool]) -> tuple[Tensor, Tensor]:
    """Gradients of ``a @ b`` for operands of any number of dims."""
    wide_a = a.unsqueeze(-2) if a.dim() == 1 else a
    wide_b = b.unsqueeze(-1) if b.dim() == 1 else b
    if a.dim() == 1:
        grad = grad.unsqueeze(-1 if b.dim() == 1 else -2)
    if b.dim() == 1:
        grad = grad.unsqueeze(-1)
    da = db = _nothing()
    if mask[0]:
        da = torch.matmul(grad, wide_b.mT).sum_to_size(wide_a.shape).reshape(a.shape)
    if mask[1]:
        db = torch.matmul(wide_a.mT, grad).sum_to_size(wide_b.shape).reshape(b.shape)
    return da, db


def linear_backward(
    x: Tensor, grad: Tensor, weight: Tensor, mask: list[bool]
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of ``x @ weight.T + bias``."""
    rows, grads = x.reshape(-1, x.shape[-1]), grad.reshape(-1, grad.shape[-1])
    return (
        torch.matmul(grad, weight) if mask[0] else _nothing(),
        grads.mT @ rows if mask[1] else _nothing(),
        grads.sum(0) if mask[2] else _nothing(),
    )


def histc(x: Tensor, bins: int = 100, min: float = 0, max: float = 0) -> Tensor:
    """Histogram that also counts integers, as the device's does."""
    if x.is_floating_point():
        return torch.histc(x, bins, min, max)
    return torch.histc(x.double(), bins, min, max).to(x.dtype)


_TWINS: dict[str, Callable[..., Any]] = {
    "matmul_backward": matmul_backward,
    "linear_backward": linear_backward,
    "histc": histc,
}


# ---------------------------------------------------------------- memory and copies


def _unwritten(size: Any, stride: Any, dtype: Any, where: Any) -> Tensor:
    # made from an npu tensor, it may still be for another device
    if torch.device(where).type != "npu":
        return torch.empty_strided(size, stride, dtype=dtype, device=where)
    return poison(raw_empty(size, stride, dtype, where))


def _empty(
    size: Any,
    *,
    dtype: Any = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: Any = None,
    memory_format: Any = None,
) -> Tensor:
    stride = torch.empty(size, device="meta", memory_format=memory_format).stride()
    return _unwritten(size, stride, dtype or torch.get_default_dtype(), device or "npu")


def _empty_strided(
    size: Any,
    stride: Any,
    *,
    dtype: Any = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: Any = None,
) -> Tensor:
    return _unwritten(size, stride, dtype or torch.get_default_dtype(), device or "npu")


def _copy_(to: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    host(to).copy_(host(source))
    return to


def _copy_from(source: Tensor, to: Tensor, non_blocking: bool = False) -> Tensor:
    return _copy_(to, source)


def _copy_from_and_resize(source: Tensor, to: Tensor) -> Tensor:
    if to.shape != source.shape:
        to.resize_(source.shape)
    return _copy_(to, source)


def _to_copy(
    x: Tensor,
    *,
    dtype: Any = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: Any = None,
    non_blocking: bool = False,
    memory_format: Any = None,
) -> Tensor:
    target = x.device if device is None else torch.device(device)
    copied = aten._to_copy.default(
        host(x), dtype=dtype, device=torch.device("cpu"), memory_format=memory_format
    )
    return _device(copied, target) if target.type == "npu" else copied.to(target)


def _local_scalar_dense(x: Tensor) -> Any:
    return host(x).item()


def _empty_like(
    x: Tensor,
    *,
    dtype: Any = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: Any = None,
    memory_format: Any = None,
) -> Tensor:
    like = torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device="meta")
    stride = torch.empty_like(like, memory_format=memory_format).stride()
    return _unwritten(x.size(), stride, dtype or x.dtype, device or x.device)


def _new_empty(
    x: Tensor,
    size: Any,
    *,
    dtype: Any = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: Any = None,
) -> Tensor:
    return _empty(size, dtype=dtype or x.dtype, device=device or x.device)


def _new_empty_strided(
    x: Tensor,
    size: Any,
    stride: Any,
    *,
    dtype: Any = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: Any = None,
) -> Tensor:
    return _empty_strided(size, stride, dtype=dtype or x.dtype, device=device or x.device)


_device = device

_MEMORY: dict[str, Callable[..., Any]] = {
    "empty.memory_format": _empty,
    "empty_strided": _empty_strided,
    "empty_like": _empty_like,
    "new_empty": _new_empty,
    "new_empty_strided": _new_empty_strided,
    "copy_": _copy_,
    "_copy_from": _copy_from,
    "_copy_from_and_resize": _copy_from_and_resize,
    "_to_copy": _to_copy,
    "_local_scalar_dense": _local_scalar_dense,
}


# ---------------------------------------------------------------- the rule for all others


def _target(op: Any, values: Any) -> torch.device | str:
    """Device of a call's results: the one it names, or where its arguments are.

    Raises:
        RuntimeError: If arguments are on several devices. Numbers may come from the CPU.
    """
    leaves = tree_leaves(values)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    where = next((t.device for t in tensors if t.device.type == "npu"), None)
    for tensor in tensors[:1] if op._opname in _INDEXED else tensors:
        if where is not None and tensor.device != where and tensor.dim():
            raise RuntimeError(
                f"Expected all tensors to be on the same device, but found at least two devices, "
                f"{where} and {tensor.device}! (when calling {op})"
            )
    return next((leaf for leaf in leaves if isinstance(leaf, torch.device)), where or "npu")


def _store(to: Tensor, result: Tensor) -> None:
    if to.shape != result.shape:
        to.resize_(result.shape)
    host(to).copy_(result)


def kernel(
    op: Any, compute: Callable[..., Any] | None = None, alias: Callable[[Any], Any] = host
) -> Callable[..., Any]:
    """Kernel of one operator: ``compute`` (the operator itself by default) on CPU aliases.

    Arguments that are written are written in place; ``out`` arguments are resized like on a CPU;
    other results become new npu tensors.
    """
    schema = op._schema
    call = op if compute is None else compute
    names = [argument.name for argument in schema.arguments]
    written = [
        (i, a.name, a.is_out)
        for i, a in enumerate(schema.arguments)
        if a.alias_info is not None and a.alias_info.is_write
    ]
    has_generator, draws = "generator" in names, random.is_random(op)

    def run(*args: Any, **kwargs: Any) -> Any:
        where = _target(op, (args, kwargs))
        cpu_args, cpu_kwargs = list(tree_map(alias, args)), dict(tree_map(alias, kwargs))
        given: dict[str, Any] = {}
        for i, name, is_out in written:
            given[name] = args[i] if i < len(args) else kwargs.get(name)
            if is_out:
                # a CPU kernel may resize its out argument, which an alias cannot
                cpu_kwargs[name] = tree_map(lambda t: torch.empty(0, dtype=t.dtype), given[name])
        if draws:
            generator = random.draw(kwargs.get("generator"))
            if has_generator:
                cpu_kwargs["generator"] = generator
            with random.as_default(generator):
                result = call(*cpu_args, **cpu_kwargs)
        else:
            result = call(*cpu_args, **cpu_kwargs)
        if not written:
            return tree_map(lambda value: device(value, where), result)
        for _, name, is_out in written:
            if is_out:
                for to, value in zip(
                    tree_leaves(given[name]), tree_leaves(cpu_kwargs[name]), strict=True
                ):
                    _store(to, value)
        if not schema.returns:
            return None
        if all(r.alias_info is not None for r in schema.returns):
            outputs = tuple(given[name] for _, name, _ in written)[: len(schema.returns)]
            return outputs[0] if len(outputs) == 1 else outputs
        return tree_map(lambda value: device(value, where), result)

    return run


def _is_view(op: Any) -> bool:
    return any(r.alias_info is not None and not r.alias_info.is_write for r in op._schema.returns)


def registered(namespace: str) -> list[tuple[str, Any]]:
    """Operators of a namespace that torch_npu has a device kernel for: full name, object."""
    found = []
    for full in torch._C._dispatch_get_registrations_for_dispatch_key("PrivateUse1"):
        space, _, rest = full.partition("::")
        base, _, overload = rest.partition(".")
        if space != namespace:
            continue
        packet = getattr(getattr(torch.ops, space), base, None)
        op = getattr(packet, overload or "default", None)
        if op is not None:
            found.append((rest, op))
    return found


def install(library: torch.library.Library, autograd: torch.library.Library) -> int:
    """Register the kernels.

    Args:
        library: For ``aten`` and PrivateUse1.
        autograd: For ``aten`` and AutogradPrivateUse1.

    Returns:
        How many operators have one.
    """
    count = 0
    for name, op in registered("aten"):
        if name in _KEPT or (_is_view(op) and name not in _MEMORY):
            continue
        function = _MEMORY.get(name) or kernel(op, _TWINS.get(name))
        library.impl(name, function, allow_override=True)
        count += 1
    for name in _COMPOSITE:
        op = getattr(getattr(aten, name.partition(".")[0]), name.partition(".")[2] or "default")
        for target in (library, autograd):
            target.impl(name, op.decompose, allow_override=True)
    return count
