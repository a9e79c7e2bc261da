"""``torchtitan-npu plan CONFIG``: what would be replaced, without weights and without a device."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import click

from torchtitan_npu_core.compat import require_torch
from torchtitan_npu_core.configs import check_config, find_config
from torchtitan_npu_core.errors import ConverterError
from torchtitan_npu_core.report import plan_rows, short_class, summary_lines, table, to_json
from torchtitan_npu_core.specs import DEVICE_FAMILIES

if TYPE_CHECKING:
    from torchtitan_npu_core.plan import ConversionPlan


def collapsed(rows: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    """Rows that differ only in numbers of their names, as one row with a count."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for row in rows:
        pattern = re.sub(r"\b\d+\b", "*", row["fqn"]) or "(the model)"
        new = short_class(row["replacement"]) or "-"
        why = row["reason"] or row["note"]
        key = (row["converter"], row["state"], pattern, short_class(row["class"]), new, why)
        groups.setdefault(key, []).append(row["fqn"])
    return [(*key[:3], str(len(fqns)), *key[3:]) for key, fqns in groups.items()]


def _requested(job_config: Any) -> tuple[list[str], list[str]]:
    from torchtitan.protocols.model_converter import _registry_model_converter_cls as host

    from torchtitan_npu_core.registry import check_is_list
    from torchtitan_npu_core.titan.session import installed

    check_is_list(job_config.model.converters)
    ours = installed().names
    foreign = [n for n in job_config.model.converters if n not in ours and n in host]
    return [n for n in job_config.model.converters if n not in foreign], foreign


def make_plan(args: list[str], target: str) -> tuple[ConversionPlan, list[str], list[str]]:
    """Plan a job: the plan, problems found, and converters that belong to others."""
    require_torch("A plan")
    from torchtitan_npu_core.limits import target_device
    from torchtitan_npu_core.operators import declared_specs
    from torchtitan_npu_core.plan import plan_conversion
    from torchtitan_npu_core.registry import SECTION
    from torchtitan_npu_core.titan.job import build_meta_model, job_sizes, read_job
    from torchtitan_npu_core.titan.session import installed

    job_config = read_job(args)
    names, foreign = _requested(job_config)
    registry = installed()
    offers = registry.resolve(names)
    settings = registry.settings(getattr(job_config, SECTION, None))
    model = build_meta_model(job_config)
    plan = plan_conversion(model, offers, settings.options, settings.allow_unmatched)
    problems = []
    try:
        plan.check_matched()
    except ConverterError as error:
        problems.append(str(error))
    family = target or settings.target or target_device()
    if family:
        specs = declared_specs(registry.plugins)
        problems += plan.limit_problems(family, job_sizes(job_config), specs)
    return plan, problems, foreign


@click.command("plan", context_settings={"ignore_unknown_options": True})
@click.argument("config")
@click.option(
    "--target",
    type=click.Choice(list(DEVICE_FAMILIES)),
    default=None,
    help="Also check the limits of this device family.",
)
@click.option("--all", "everything", is_flag=True, help="One row per module.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.argument("options", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def command(
    ctx: click.Context,
    config: str,
    target: str | None,
    everything: bool,
    as_json: bool,
    options: tuple[str, ...],
) -> None:
    """Show what would be replaced in the model of CONFIG, a TOML file or a shipped config.

    Further OPTIONS are torchtitan's, e.g. --model.flavor 671B.
    """
    path = find_config(config)
    check_config(path, options)
    args = ["--job.config_file", str(path), *options]
    plan, problems, foreign = make_plan(args, target or "")
    rows = plan_rows(plan)
    if as_json:
        data = {
            "config": str(path),
            "target": target or "",
            "searched": plan.searched,
            "problems": problems,
            "other_converters": foreign,
            "calls_per_forward": plan.operator_calls(),
            "rows": rows,
            "untouched": plan.untouched,
        }
        click.echo(to_json("plan", data))
        ctx.exit(1 if problems else 0)
    if rows and everything:
        keys = ("converter", "state", "fqn", "class", "replacement")
        lines = [[*(str(r[k]) for k in keys), r["reason"] or r["note"]] for r in rows]
        click.echo(table(("CONVERTER", "STATE", "MODULE", "CLASS", "BECOMES", "NOTE"), lines))
    elif rows:
        header = ("CONVERTER", "STATE", "MODULES", "COUNT", "CLASS", "BECOMES", "NOTE")
        click.echo(table(header, collapsed(rows)))
    for name, number in sorted(plan.operator_calls().items()):
        click.echo(f"{name}: {number} calls per forward")
    for name in foreign:
        click.echo(f"{name}: not a converter of ours, left to its owner")
    click.echo(summary_lines(plan)[-1].replace("applied", "would apply"))
    for problem in problems:
        click.echo(f"problem: {problem}", err=True)
    ctx.exit(1 if problems else 0)
