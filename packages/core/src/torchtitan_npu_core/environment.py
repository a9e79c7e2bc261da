"""Facts about this environment, and what to make of them, for ``torchtitan-npu doctor``."""

from __future__ import annotations

import os
import platform
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from packaging.version import Version

from torchtitan_npu_core.compat import installed_version
from torchtitan_npu_core.errors import ConverterError, DeclarationError, OperatorVersionError
from torchtitan_npu_core.limits import family_of
from torchtitan_npu_core.loading import PluginSet, declared_operators
from torchtitan_npu_core.schemas import (
    Generation,
    calls_misfit,
    fitting_versions,
    generation_of,
)
from torchtitan_npu_core.specs import DEVICE_FAMILIES, OperatorSpec

OK, NOTE, PROBLEM = "ok", "note", "problem"

TESTED = {"torch": "2.13.0", "torchtitan": "0.2.2", "torch_npu": "2.13.0"}
"""Versions this release was tested with."""

OTHER_PACKAGE = "torchtitan-npu"
"""A package of another project, with converters of some of the same names."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the doctor's answer.

    Args:
        subject: What was looked at.
        level: ``ok``, ``note`` or ``problem``.
        text: What was found, and for a problem the next step.
    """

    subject: str
    level: str
    text: str

    def as_data(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return asdict(self)


def examine(plugins: PluginSet) -> list[Finding]:
    """Look at everything a training run needs."""
    findings = [
        Finding("python", OK, f"{platform.python_version()} at {sys.executable}"),
        _core(),
        *_plugins(plugins),
        *_names(plugins),
        _other_package(),
    ]
    torch_found = _torch()
    findings += [torch_found, _cann(), _torchtitan()]
    specs, unusable = _declared(plugins)
    findings += unusable
    live = installed_version("torch") is not None and torch_found.level != PROBLEM
    if live:
        findings += [_torch_npu(), *_operators(specs)]
    return [*findings, *_fits(plugins, specs, live)]


def _core() -> Finding:
    from torchtitan_npu_core import __version__

    return Finding("torchtitan-npu-core", OK, __version__)


def _plugins(plugins: PluginSet) -> list[Finding]:
    if not plugins.records:
        return [
            Finding("plugins", NOTE, "none installed; try: pip install torchtitan-npu-op-norm-rope")
        ]
    found = []
    for record in plugins.records:
        subject = f"plugin {record.name}"
        if record.state == "loaded":
            names = ", ".join(spec.name for spec in record.converters) or "no converters"
            found.append(Finding(subject, OK, f"{record.owner}: {names}"))
        elif record.state == "disabled":
            found.append(Finding(subject, NOTE, f"{record.owner}: {record.message}"))
        else:
            text = f"{record.owner} is {record.state}: {record.message}"
            if record.traceback:
                text += "\n" + record.traceback.rstrip()
            found.append(Finding(subject, PROBLEM, text))
        if record.also_at:
            text = f"found again at {', '.join(record.also_at)}; {record.location} is used"
            found.append(Finding(subject, NOTE, text))
    found.append(Finding("plugin set", OK, plugins.digest))
    return found


def _names(plugins: PluginSet) -> list[Finding]:
    from torchtitan_npu_core.registry import ConverterRegistry

    registry = ConverterRegistry(plugins)
    found = []
    for name in registry.names:
        try:
            registry.get(name)
        except ConverterError as error:
            found.append(Finding(f"converter {name}", PROBLEM, str(error)))
    return found


def _other_package() -> Finding:
    version = installed_version(OTHER_PACKAGE)
    if version is None:
        return Finding("conflicts", OK, "none")
    return Finding(
        "conflicts",
        PROBLEM,
        f"{OTHER_PACKAGE} {version} is installed too: a different project with converters of the "
        f"same names. Jobs that import both fail. Uninstall one: pip uninstall {OTHER_PACKAGE}",
    )


def _version_note(name: str, version: str) -> tuple[str, str]:
    tested = TESTED[name]
    if version.split("+")[0] == tested:
        return OK, version
    return NOTE, f"{version}; this release was tested with {tested}"


def _torch() -> Finding:
    version = installed_version("torch")
    if version is None:
        return Finding(
            "torch",
            NOTE,
            "not installed; without an NPU: pip install 'torchtitan-npu-core[cpu]'",
        )
    # torch_npu loads itself with torch and takes it down when CANN is missing: look at each alone
    os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    try:
        import torch
    except Exception as error:
        return Finding("torch", PROBLEM, f"{version} cannot be imported: {error}")
    return Finding("torch", *_version_note("torch", torch.__version__))


def _torch_npu() -> Finding:
    version = installed_version("torch_npu")
    if version is None:
        return Finding("torch_npu", OK, "not installed; reference kernels are used")
    try:
        from torch_npu import npu
    except Exception as error:
        return Finding(
            "torch_npu",
            PROBLEM,
            f"{version} cannot be imported: {type(error).__name__}: {error}. Source CANN's "
            f"set_env.sh, or set TORCH_DEVICE_BACKEND_AUTOLOAD=0 to run without it.",
        )
    built_for, torch_version = Version(version), installed_version("torch") or "0"
    if built_for.release[:3] != Version(torch_version).release[:3]:
        wanted = ".".join(map(str, built_for.release[:3]))
        return Finding(
            "torch_npu",
            PROBLEM,
            f"{version} is built for torch {wanted}, found {torch_version}. Install matching "
            f"releases of the two.",
        )
    level, text = _version_note("torch_npu", version)
    generation = generation_of(version)
    text += f"; schemas of generation {generation.name if generation else '(unknown release)'}"
    devices = npu.device_count()
    if not devices:
        return Finding("torch_npu", NOTE, f"{text}; no device")
    name = npu.get_device_name(0)
    family = family_of(name)
    if not family:
        return Finding("torch_npu", NOTE, f"{text}; {devices} x {name}, no known device family")
    return Finding(
        "torch_npu",
        level,
        f"{text}; {devices} x {name}, family {family}: {DEVICE_FAMILIES[family]}",
    )


def _torchtitan() -> Finding:
    version = installed_version("torchtitan")
    if version is None:
        return Finding("torchtitan", NOTE, "not installed; plan and train need it")
    if installed_version("triton") is None:
        return Finding(
            "torchtitan",
            PROBLEM,
            f"{version} imports triton, which is not installed: pip install triton",
        )
    return Finding("torchtitan", *_version_note("torchtitan", version))


def cann_version(environ: dict[str, str] | None = None) -> str | None:
    """Version of the CANN toolkit the environment points at, or None."""
    environ = dict(os.environ) if environ is None else environ
    roots = [environ.get("ASCEND_HOME_PATH"), environ.get("ASCEND_TOOLKIT_HOME")]
    roots.append("/usr/local/Ascend/ascend-toolkit/latest")
    for root in roots:
        for file in ("version.cfg", "compiler/version.info", "runtime/version.info"):
            path = Path(root, file) if root else None
            if path is not None and path.is_file():
                found = re.search(r"(?:=|\[)\s*v?(\d+\.\d[\w.]*)", path.read_text())
                if found:
                    return found.group(1)
    return None


def _cann() -> Finding:
    version = cann_version()
    return Finding("CANN", OK, version or "not found; needed on NPUs only")


def _declared(plugins: PluginSet) -> tuple[list[OperatorSpec], list[Finding]]:
    specs, found = [], []
    for record in plugins.loaded:
        try:
            specs += declared_operators(plugins, record)
        except DeclarationError as error:
            found.append(Finding(f"plugin {record.name}", PROBLEM, str(error)))
    return specs, found


def _operators(specs: Sequence[OperatorSpec]) -> list[Finding]:
    from torchtitan_npu_core.operators import register_operator

    return [_attempt(s.name, lambda spec=s: register_operator(spec).provider) for s in specs]


def _attempt(subject: str, action: Callable[[], str]) -> Finding:
    try:
        return Finding(subject, OK, action())
    except OperatorVersionError as error:
        # the converters that call it say so
        return Finding(subject, NOTE, f"not usable here: {error.reason}")
    except Exception as error:
        return Finding(subject, PROBLEM, f"{type(error).__name__}: {error}")


def _fits(plugins: PluginSet, declared: Sequence[OperatorSpec], live: bool) -> list[Finding]:
    """Whether each converter's calls fit the operators of the installed torch_npu."""
    version = installed_version("torch_npu")
    if version is None:
        return []
    specs = {spec.name: spec for spec in declared}
    generation = generation_of(version)
    found = []
    for record in plugins.loaded:
        for converter in record.converters:
            called = [specs[n] for n in converter.operators if n in specs and n.startswith("npu::")]
            if not called:
                continue
            found.append(_fit(converter.name, called, generation, version, live))
            found += [
                Finding(f"converter {converter.name}", NOTE, f"{spec.name}: {issue.text}")
                for spec in called
                for issue in spec.known_issues
                if generation is not None and generation.name in issue.generations
            ]
    return found


def _fit(
    converter: str,
    called: Sequence[OperatorSpec],
    generation: Generation | None,
    version: str,
    live: bool,
) -> Finding:
    subject = f"converter {converter}"
    if live:
        from torchtitan_npu_core.operators import device_library_problem, operator_misfit

        if device_library_problem() is None:
            problems = {spec.name: operator_misfit(spec) for spec in called}
            return _fit_finding(subject, called, problems, f"torch_npu {version}")
    if generation is None:
        text = f"torch_npu {version} is not known to this release; its schemas were not compared"
        return Finding(subject, NOTE, text)
    problems = {
        spec.name: calls_misfit(spec, generation.schemas.get(spec.name.partition("::")[2]))
        for spec in called
    }
    return _fit_finding(subject, called, problems, f"the schemas of torch_npu {version}")


def _fit_finding(
    subject: str, called: Sequence[OperatorSpec], problems: Mapping[str, str | None], what: str
) -> Finding:
    wrong = {name: problem for name, problem in problems.items() if problem}
    if not wrong:
        return Finding(subject, OK, f"its {len(called)} operators fit {what}")
    fitting = [fitting_versions(s.name, s.schema, s.calls) for s in called]
    both = [v for v in fitting[0] if all(v in other for other in fitting)]
    listed = "; ".join(f"{name}: {problem}" for name, problem in wrong.items())
    advice = f"Releases that fit: {', '.join(both)}" if both else "No known release fits"
    return Finding(subject, PROBLEM, f"does not fit {what}: {listed}. {advice}.")
