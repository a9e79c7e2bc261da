"""One job's conversion: planned once on the unchanged model, carried out converter by converter."""

from __future__ import annotations

import functools
import json
import logging
import os
import tempfile
import weakref
from typing import Any

import torch.distributed as dist
from torch import nn

from torchtitan_npu_core import apply, report
from torchtitan_npu_core.errors import DeviceLimitError, PluginSetMismatchError
from torchtitan_npu_core.fsdp import use_sum_reduction
from torchtitan_npu_core.limits import environment_target, set_target, target_device
from torchtitan_npu_core.loading import PluginSet, discover_and_load, report_problems
from torchtitan_npu_core.operators import declared_specs, device_family
from torchtitan_npu_core.plan import ConversionPlan, plan_conversion
from torchtitan_npu_core.registry import SECTION, ConverterRegistry, check_is_list
from torchtitan_npu_core.titan.job import job_sizes, metrics_rank

logger = logging.getLogger(__name__)


@functools.cache
def installed() -> ConverterRegistry:
    """Converters of all installed plugins, loaded once per process."""
    return ConverterRegistry(discover_and_load())


class ConversionSession:
    """The conversion that one job config asks for.

    Args:
        job_config: torchtitan's config object. Its ``model.converters`` may also name converters
            of others; they are left alone.

    Raises:
        ConverterError: If the list of converters or the ``[npu]`` section is wrong.
    """

    def __init__(self, job_config: Any) -> None:
        registry = installed()
        check_is_list(job_config.model.converters)
        names = [n for n in job_config.model.converters if n in registry.names]
        self.plugins = registry.plugins
        self.settings = registry.settings(getattr(job_config, SECTION, None))
        report_problems(self.plugins, self.settings.strict)
        self.offers = registry.resolve(names)
        self.names = [offer.spec.name for offer in self.offers]
        self.dump_folder = job_config.job.dump_folder
        self.sizes = job_sizes(job_config)
        self.reporting_rank = metrics_rank(job_config, _world_size())
        # always set: a job that targets nothing must not inherit what an earlier one targeted
        set_target(self.settings.target or environment_target() or device_family())
        check_same_plugins(self.plugins)
        self._plans: weakref.WeakKeyDictionary[
            nn.Module, tuple[ConversionPlan, set[str], list[Any]]
        ] = weakref.WeakKeyDictionary()

    def plan(self, model: nn.Module) -> ConversionPlan:
        """Plan the whole list on an unchanged model."""
        return plan_conversion(
            model, self.offers, self.settings.options, self.settings.allow_unmatched
        )

    def check_limits(self, plan: ConversionPlan) -> None:
        """Refuse a plan that the targeted device family could not run.

        Raises:
            DeviceLimitError: With every problem.
        """
        family = target_device()
        if not family:
            return
        specs = declared_specs(self.plugins)
        problems = plan.limit_problems(family, self.sizes, specs)
        if problems:
            raise DeviceLimitError("This model", family, problems)

    def convert(self, name: str, model: nn.Module) -> None:
        """Carry out one converter, at its turn in the host's list.

        The first one plans the whole list, so that every claim is made on the unchanged model; the
        last one reports.
        """
        if model not in self._plans:
            plan = self.plan(model)
            plan.check_matched()
            self.check_limits(plan)
            apply.prepare(plan, self.plugins)
            self._plans[model] = (plan, set(), [])
        plan, done, undo = self._plans[model]
        offer = next(o for o in self.offers if o.spec.name == name)
        save = apply.save_operators(self.plugins, offer.plugin)
        apply.apply_converter(model, plan, name, save, undo)
        done.add(name)
        if done == set(self.names):
            del self._plans[model]
            apply.add_root_hook(model, use_sum_reduction)
            result = apply.finish(plan, self.plugins)
            if _rank() == self.reporting_rank:
                report.log_result(plan, result, self.plugins, logger)
                self._write(report.result_data(plan, result, self.plugins))

    def _write(self, data: dict[str, Any]) -> None:
        """Leave the report beside the job's other outputs, complete or not at all."""
        if not self.dump_folder:
            return
        path, temporary = os.path.join(self.dump_folder, "conversion.json"), ""
        try:
            os.makedirs(self.dump_folder, exist_ok=True)
            handle, temporary = tempfile.mkstemp(dir=self.dump_folder, suffix=".tmp")
            with os.fdopen(handle, "w") as file:
                json.dump(data, file, indent=1)
            os.replace(temporary, path)
        except OSError as error:
            # a report that cannot be written is no reason to lose the run
            logger.warning("[converter] the report could not be written to %s: %s", path, error)
            if temporary and os.path.exists(temporary):
                os.unlink(temporary)


_sessions: dict[int, tuple[weakref.ref[Any], ConversionSession]] = {}


def session_for(job_config: Any) -> ConversionSession:
    """The session of a job config; the same object for the same config."""
    known = _sessions.get(id(job_config))
    if known is not None and known[0]() is job_config:
        return known[1]
    session = ConversionSession(job_config)
    key = id(job_config)
    _sessions[key] = (weakref.ref(job_config, lambda _: _sessions.pop(key, None)), session)
    return session


def _rank() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def _world_size() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def check_same_plugins(plugins: PluginSet) -> None:
    """Compare the plugin set over all ranks.

    Raises:
        PluginSetMismatchError: On every rank, with what differs.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return
    if "fake" in dist.get_backend():
        return  # a dry run has no other ranks to ask
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (plugins.digest, plugins.identity))
    if len({digest for digest, _ in everyone}) == 1:
        return
    raise PluginSetMismatchError(plugin_differences([identity for _, identity in everyone]))


def plugin_differences(identities: list[list[str]]) -> list[str]:
    """For every plugin that not all ranks have, say which ranks have it and which do not."""
    differences = []
    for plugin in sorted({p for identity in identities for p in identity}):
        having = [r for r, identity in enumerate(identities) if plugin in identity]
        if len(having) < len(identities):
            missing = [r for r in range(len(identities)) if r not in having]
            differences.append(f"{plugin}: on ranks {having}, not on ranks {missing}")
    return differences
