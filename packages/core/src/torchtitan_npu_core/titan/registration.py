"""Make our converter names known to torchtitan, and check a job's list before its model exists."""

from __future__ import annotations

import logging
import sys
from typing import Any

from torch import nn
from torchtitan.config import JobConfig
from torchtitan.protocols import model_converter as host

from torchtitan_npu_core.errors import NameTakenError
from torchtitan_npu_core.registry import check_is_list
from torchtitan_npu_core.titan.session import installed, session_for

logger = logging.getLogger(__name__)


class TitanConverter(host.ModelConverter):
    """What torchtitan constructs for one of our names.

    Args:
        job_config: torchtitan's config.
        parallel_dims: Degrees of parallelism; converters work on the whole model before any of it
            is applied.

    Raises:
        ConverterError: If the job's list of converters cannot be used.
    """

    name = ""

    def __init__(self, job_config: JobConfig, parallel_dims: Any) -> None:
        self.session = session_for(job_config)

    def convert(self, model: nn.Module) -> None:
        """Convert the model in place."""
        name = installed().get(self.name).spec.name
        self.session.convert(name, model)

    def post_optimizer_hook(self, model: nn.Module | list[nn.Module]) -> None:
        """Nothing to do after an optimizer step."""


def register(requested: list[str] | None = None) -> list[str]:
    """Register every installed converter name with torchtitan. Doing it again changes nothing.

    Args:
        requested: Names the job asks for, or None for all. A name that somebody else has taken is
            an error if it is asked for, and a warning otherwise.

    Returns:
        The names that are ours.

    Raises:
        NameTakenError: If another package has registered one of the names.
    """
    table = host._registry_model_converter_cls
    ours = []
    for name in installed().names:
        known = table.get(name)
        if known is None:
            cls = type("TitanConverter", (TitanConverter,), {"name": name, "__doc__": None})
            host.register_model_converter(cls, name)
        elif not issubclass(known, TitanConverter):
            error = NameTakenError(name, f"{known.__module__}.{known.__qualname__}")
            if requested is None or name in requested:
                raise error
            logger.warning("[converter] %s", error)
            continue
        ours.append(name)
    return ours


def check_names(job_config: JobConfig) -> None:
    """Refuse a list of converters that cannot work, before device, process group and model.

    Raises:
        ConverterError: With the reason and the next step.
    """
    names = job_config.model.converters
    check_is_list(names)
    table = host._registry_model_converter_cls
    for name in names:
        if name not in table:
            # raises, with what is installed, what is close and what is broken
            installed().get(name)
    ours = [n for n in names if n in installed().names]
    installed().resolve(ours)


def calling_job_config() -> JobConfig | None:
    """The config of the trainer that is importing us, if one is."""
    # what: looks up the stack for the trainer's own job_config variable
    # why:  torchtitan looks converter names up in a plain dict after building the model, so an
    #       unknown name is a bare KeyError; this import is the only earlier moment that is ours,
    #       and importing a module passes no arguments
    # ends: when torchtitan lets a package see the config, or reports unknown names itself
    # test: tests/trainer/test_registration.py::test_unknown_name_under_plain_torchtitan
    frame = sys._getframe()
    while frame is not None:
        config = frame.f_locals.get("job_config")
        if isinstance(config, JobConfig):
            return config
        frame = frame.f_back
    return None


def register_for_importer() -> None:
    """Register our names and, when a trainer is importing us, check what it asks for."""
    config = calling_job_config()
    if config is None:
        # nobody asks for anything yet: a taken name is worth a warning
        register([])
        return
    check_is_list(config.model.converters)
    register(list(config.model.converters))
    check_names(config)
