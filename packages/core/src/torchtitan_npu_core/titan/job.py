"""A job's config and its model without storage, for commands that look before they run."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torchtitan.config import TORCH_DTYPE_MAP, ConfigManager
from torchtitan.protocols.train_spec import get_train_spec
from torchtitan.tools.utils import set_default_dtype

from torchtitan_npu_core.errors import CommandError, did_you_mean
from torchtitan_npu_core.plan import JobSizes


@contextmanager
def _only_errors() -> Iterator[None]:
    """Keep what the host logs while it only looks out of a command's output."""
    root = logging.getLogger()
    level = root.level
    root.setLevel(logging.ERROR)
    try:
        yield
    finally:
        root.setLevel(level)


def read_job(args: Sequence[str]) -> Any:
    """Parse torchtitan's options as the trainer does."""
    with _only_errors():
        job_config = ConfigManager().parse_args(list(args))
    return normalised(job_config)


def normalised(job_config: Any) -> Any:
    """Let ``--model.converters=`` mean none: the host reads it as one converter without a name."""
    if job_config.model.converters == [""]:
        job_config.model.converters = []
    return job_config


def metrics_rank(job_config: Any, world_size: int) -> int:
    """Rank that sees the loss: the first one of the last pipeline stage.

    Args:
        job_config: torchtitan's config.
        world_size: Number of ranks.
    """
    parallelism = job_config.parallelism
    stages = parallelism.pipeline_parallel_degree
    if stages <= 1 or parallelism.pipeline_parallel_schedule == "ZBVZeroBubble":
        return 0
    return (world_size // stages) * (stages - 1)


def build_meta_model(job_config: Any) -> nn.Module:
    """Build the job's model on the meta device, as the trainer does before conversion.

    Raises:
        CommandError: If model or flavor is unknown.
    """
    model_args, spec = check_model(job_config)
    with _only_errors():
        model_args.update_from_config(job_config)
        with torch.device("meta"), set_default_dtype(TORCH_DTYPE_MAP[job_config.training.dtype]):
            return spec.model_cls(model_args)


def check_model(job_config: Any) -> tuple[Any, Any]:
    """Model arguments and train spec that a job names.

    Raises:
        CommandError: If model or flavor is unknown.
    """
    if job_config.experimental.custom_import:
        importlib.import_module(job_config.experimental.custom_import)
    name, flavor = job_config.model.name, job_config.model.flavor
    try:
        spec = get_train_spec(name)
    except ValueError as error:
        raise CommandError(f"torchtitan knows no model {name!r}: {error}") from error
    if flavor not in spec.model_args:
        raise CommandError(
            f"Model {name!r} has no flavor {flavor!r}.{did_you_mean(flavor, spec.model_args)} "
            f"Flavors: {', '.join(sorted(spec.model_args))}."
        )
    return spec.model_args[flavor], spec


def job_sizes(job_config: Any) -> JobSizes:
    """Sizes of one forward on one rank, as device limits see them."""
    parallelism, training = job_config.parallelism, job_config.training
    batch = training.local_batch_size
    if parallelism.pipeline_parallel_degree > 1:
        batch = parallelism.pipeline_parallel_microbatch_size
    return JobSizes(
        batch=batch,
        seq_len=training.seq_len // max(1, parallelism.context_parallel_degree),
        tensor_parallel=max(1, parallelism.tensor_parallel_degree),
    )
