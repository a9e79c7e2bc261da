"""``torchtitan-npu explain NAME``: everything declared about one converter. Imports no torch."""

from __future__ import annotations

from typing import Any

import click

from torchtitan_npu_core.compat import installed_version, read_requirements
from torchtitan_npu_core.loading import PluginSet, discover_and_load
from torchtitan_npu_core.registry import SECTION, ConverterRegistry, Offer
from torchtitan_npu_core.report import to_json
from torchtitan_npu_core.specs import DEVICE_FAMILIES, DeviceLimit, OperatorSpec


def _limit_text(limit: DeviceLimit) -> str:
    parts = []
    if limit.choices:
        parts.append("one of " + ", ".join(map(str, limit.choices)))
    if limit.minimum is not None:
        parts.append(f"at least {limit.minimum}")
    if limit.maximum is not None:
        parts.append(f"at most {limit.maximum}")
    if limit.multiple_of is not None:
        parts.append(f"a multiple of {limit.multiple_of}")
    families = ", ".join(limit.families)
    reason = f" ({limit.reason})" if limit.reason else ""
    return f"{limit.quantity} {' and '.join(parts)} on {families}{reason}"


def _operators(plugins: PluginSet, offer: Offer) -> list[OperatorSpec]:
    declared = {
        spec.name: spec
        for specs in plugins.call(offer.plugin, "torchtitan_npu_operators")
        for spec in specs
    }
    return [declared[name] for name in offer.spec.operators if name in declared]


def _needs(offer: Offer) -> list[str]:
    found = []
    for requirement in read_requirements(offer.plugin.distribution):
        version = installed_version(requirement.name)
        state = f"found {version}" if version else "not installed"
        found.append(f"{requirement.name} {requirement.specifier} ({state})")
    return found


def facts(name: str, plugins: PluginSet) -> dict[str, Any]:
    """Everything declared about a converter, as plain data."""
    offer = ConverterRegistry(plugins).get(name)
    spec = offer.spec
    saved = {
        operator
        for returned in plugins.call(offer.plugin, "torchtitan_npu_selective_save_operators")
        for operator in returned
    }
    return {
        "name": spec.name,
        "summary": spec.summary,
        "from": offer.plugin.owner,
        "state": offer.plugin.state,
        "replaces": list(spec.replaces),
        "requires": list(spec.requires),
        "after": list(spec.after),
        "conflicts": list(spec.conflicts),
        "aliases": list(spec.aliases),
        "needs": _needs(offer),
        "options": [
            {
                "name": o.name,
                "default": o.default,
                "choices": list(o.choices),
                "summary": o.summary,
            }
            for o in spec.options
        ],
        "operators": [
            {
                "name": o.name,
                "schema": o.schema,
                "source": o.source,
                "saved_by_selective_checkpointing": o.name in saved,
                "limits": [_limit_text(limit) for limit in o.limits],
            }
            for o in _operators(plugins, offer)
        ],
    }


@click.command("explain")
@click.argument("name")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(name: str, as_json: bool) -> None:
    """Explain one converter: what it replaces, needs, calls and cannot do."""
    data = facts(name, discover_and_load())
    if as_json:
        click.echo(to_json("explain", data))
        return

    def line(label: str, values: list[str]) -> None:
        for i, value in enumerate(values or ["-"]):
            click.echo(f"  {label if i == 0 else '':<11}{value}")

    click.echo(f"{data['name']}: {data['summary']}")
    line("from", [f"{data['from']}, {data['state']}"])
    line("replaces", data["replaces"])
    for label in ("requires", "after", "conflicts", "aliases"):
        line(label, [", ".join(data[label])] if data[label] else [])
    line("needs", data["needs"])
    line(
        "options",
        [
            f"[{SECTION}.{data['name']}] {o['name']} = {o['default']!r}: {o['summary']}"
            + (f" (one of {', '.join(map(repr, o['choices']))})" if o["choices"] else "")
            for o in data["options"]
        ],
    )
    for operator in data["operators"]:
        line("operator", [operator["name"], f"  {operator['schema']}"])
        for limit in operator["limits"]:
            line("", [f"  limit: {limit}"])
        if operator["saved_by_selective_checkpointing"]:
            line("", ["  its output is kept by selective activation checkpointing"])
    families = ", ".join(f"{k} = {v}" for k, v in DEVICE_FAMILIES.items())
    click.echo(f"  families   {families}")
