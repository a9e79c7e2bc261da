"""Selective activation checkpointing that keeps the outputs plugins ask for.

torchtitan wraps blocks after conversion, with a policy that knows only its own list of operators.
The converted model therefore carries a forward pre-hook that, before its first forward, gives each
of its checkpointed blocks a policy that also keeps the operators plugins named.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

SAVE_ATTRIBUTE = "_torchtitan_npu_selective_save"
_DONE_ATTRIBUTE = "_torchtitan_npu_selective_done"


def resolve_operator(name: str) -> Any:
    """Return the default overload of ``"namespace::operator"``."""
    namespace, _, operator = name.partition("::")
    return getattr(getattr(torch.ops, namespace), operator).default


def saving_contexts(inner: Callable[[], Any], operators: frozenset[Any]) -> Any:
    """Context function that keeps the outputs of extra operators on top of another policy.

    Args:
        inner: The context function the host gave the block.
        operators: Overloads whose outputs are kept.

    Returns:
        The pair of contexts ``torch.utils.checkpoint.checkpoint`` asks for.
    """
    contexts = inner()
    policy = getattr(contexts[0], "policy_fn", None)
    if policy is None:
        # not a selective policy: nothing to extend
        return contexts

    def keep(ctx: Any, func: Any, *args: Any, **kwargs: Any) -> Any:
        if func in operators:
            return CheckpointPolicy.MUST_SAVE
        return policy(ctx, func, *args, **kwargs)

    return create_selective_checkpoint_contexts(keep)


def extend_selective_checkpointing(model: nn.Module, args: Any, kwargs: Any) -> None:
    """Forward pre-hook of a converted model: extend its blocks' policies, once.

    A module-level function, so that it survives the copies that pipeline parallelism makes.
    """
    names = getattr(model, SAVE_ATTRIBUTE, ())
    if model.__dict__.get(_DONE_ATTRIBUTE) == names:
        return
    object.__setattr__(model, _DONE_ATTRIBUTE, names)
    operators = frozenset(resolve_operator(n) for n in names)
    for module in model.modules():
        checkpoint = module.__dict__.get("checkpoint_fn")
        if not isinstance(checkpoint, functools.partial):
            continue
        inner = checkpoint.keywords.get("context_fn")
        # torch.compile accepts a partial of a function here, not any callable object
        if inner is None:
            continue
        if getattr(inner, "func", None) is saving_contexts:
            inner = inner.args[0]
        module.__dict__["checkpoint_fn"] = functools.partial(
            checkpoint.func,
            *checkpoint.args,
            **{
                **checkpoint.keywords,
                "context_fn": functools.partial(saving_contexts, inner, operators),
            },
        )
