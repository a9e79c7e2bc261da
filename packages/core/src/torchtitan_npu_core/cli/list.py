"""``torchtitan-npu list``: what is installed, and in which state. Imports no torch."""

from __future__ import annotations

import click

from torchtitan_npu_core.configs import config_names, summary
from torchtitan_npu_core.discovery import PluginRecord
from torchtitan_npu_core.loading import discover_and_load
from torchtitan_npu_core.report import table, to_json


def rows(records: list[PluginRecord], everything: bool) -> list[dict[str, str]]:
    """One row per converter, and one per plugin that has none to show."""
    found = []
    for record in records:
        if not everything and record.state != "loaded":
            continue
        common = {
            "state": record.state,
            "plugin": record.name,
            "distribution": record.distribution,
            "version": record.version,
        }
        for spec in record.converters:
            found.append({"converter": spec.name, **common, "summary": spec.summary})
        if not record.converters:
            found.append({"converter": f"({record.name})", **common, "summary": record.message})
    return sorted(found, key=lambda row: (row["converter"].startswith("("), row["converter"]))


@click.command("list")
@click.option("--all", "everything", is_flag=True, help="Also show what cannot be used, and why.")
@click.option("--configs", is_flag=True, help="List the train configs that ship with the package.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(everything: bool, configs: bool, as_json: bool) -> None:
    """Show installed converters."""
    if configs:
        shipped = [{"name": name, "summary": summary(name)} for name in config_names()]
        if as_json:
            click.echo(to_json("configs", {"rows": shipped}))
        else:
            click.echo(table(("CONFIG", "SUMMARY"), [(s["name"], s["summary"]) for s in shipped]))
        return
    plugins = discover_and_load()
    found = rows(plugins.records, everything)
    if as_json:
        click.echo(to_json("list", {"digest": plugins.digest, "rows": found}))
        return
    keys = ("converter", "state", "distribution", "version", "summary")
    if found:
        lines = [[row[k].splitlines()[0] if row[k] else "" for k in keys] for row in found]
        click.echo(table([k.upper() for k in keys], lines))
    else:
        click.echo("No converters are installed. Try: pip install torchtitan-npu-op-norm-rope")
    hidden = [r for r in plugins.records if r.state != "loaded"]
    if hidden and not everything:
        click.echo(f"{len(hidden)} more cannot be used; see 'torchtitan-npu list --all'.", err=True)
