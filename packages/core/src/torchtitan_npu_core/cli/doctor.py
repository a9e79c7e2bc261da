"""``torchtitan-npu doctor``: is this environment able to run what is installed."""

from __future__ import annotations

import click

from torchtitan_npu_core.environment import PROBLEM, examine
from torchtitan_npu_core.loading import discover_and_load
from torchtitan_npu_core.report import counted, table, to_json


@click.command("doctor")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_context
def command(ctx: click.Context, as_json: bool) -> None:
    """Check versions, plugins, operators and conflicts."""
    findings = examine(discover_and_load())
    problems = [f for f in findings if f.level == PROBLEM]
    if as_json:
        click.echo(
            to_json(
                "doctor",
                {"problems": len(problems), "rows": [f.as_data() for f in findings]},
            )
        )
    else:
        lines = []
        for finding in findings:
            first, *rest = finding.text.splitlines() or [""]
            lines.append((finding.level, finding.subject, first))
            lines += [("", "", text) for text in rest]
        click.echo(table(("STATE", "SUBJECT", "FOUND"), lines))
        click.echo(counted(len(problems), "problem") + "." if problems else "No problems.")
    ctx.exit(1 if problems else 0)
