"""Rows to text and JSON: one place that decides how things read."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchtitan_npu_core.apply import ConversionResult
    from torchtitan_npu_core.loading import PluginSet
    from torchtitan_npu_core.plan import ConversionPlan

SCHEMA = 1
"""Number of the JSON layout; it grows when a key changes its meaning."""


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Aligned columns, last one ragged."""
    lines = [tuple(header), *(tuple(row) for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header) - 1)]
    return "\n".join(
        "  ".join([*(cell.ljust(w) for cell, w in zip(line, widths, strict=False)), line[-1]])
        for line in lines
    )


def to_json(kind: str, data: Mapping[str, Any]) -> str:
    """One JSON document with a schema number."""
    return json.dumps({"schema": SCHEMA, "kind": kind, **data}, indent=1)


def counted(number: int, noun: str) -> str:
    """``1 problem``, ``2 problems``."""
    return f"{number} {noun}" + ("" if number == 1 else "s")


def short_class(path: str) -> str:
    """Class name without its module."""
    return path.rpartition(".")[2]


def plugin_line(plugins: PluginSet) -> str:
    """Loaded plugins with versions, and the digest that nodes can compare by eye."""
    listed = ", ".join(f"{r.name} {r.version}" for r in plugins.loaded) or "none"
    return f"plugins: {listed} (set {plugins.digest})"


def summary_lines(plan: ConversionPlan) -> list[str]:
    """One line per converter and kind of replacement, then skipped modules, then the total."""
    lines = []
    num_replaced = num_skipped = 0
    for offer in plan.offers:
        name = offer.spec.name
        rows = plan.rows_of(name)
        done = [r for r in rows if r.state == "replaced"]
        skipped = [r for r in rows if r.state == "skipped"]
        num_replaced += len(done)
        num_skipped += len(skipped)
        kinds: dict[tuple[str, str], int] = {}
        for row in done:
            kind = (short_class(row.module_class), short_class(row.replacement_class))
            kinds[kind] = kinds.get(kind, 0) + 1
        for (old, new), number in sorted(kinds.items()):
            seen = sum(1 for r in rows if short_class(r.module_class) == old)
            lines.append(f"{name}: replaced {number} of {seen} {old} -> {new}")
        for note in sorted({r.note for r in done if r.note}):
            lines.append(f"{name}: {note}")
        for row in skipped:
            lines.append(f"{name}: skipped {row.fqn}: {row.reason}")
        kept = sum(1 for r in rows if r.state == "kept")
        if kept:
            lines.append(f"{name}: {kept} converted before")
        if not rows:
            lines.append(f"{name}: matched nothing (searched {plan.searched} modules)")
    total = f"{num_replaced} replaced, {num_skipped} skipped"
    lines.append(f"applied {counted(len(plan.offers), 'converter')}: {total}")
    return lines


def plan_rows(plan: ConversionPlan) -> list[dict[str, Any]]:
    """Rows of a plan as plain data."""
    return [
        {
            "converter": r.converter,
            "fqn": r.fqn,
            "also": list(r.also),
            "state": r.state,
            "class": r.module_class,
            "replacement": r.replacement_class,
            "reason": r.reason,
            "note": r.note,
        }
        for r in plan.rows
    ]


def result_data(
    plan: ConversionPlan, result: ConversionResult, plugins: PluginSet
) -> dict[str, Any]:
    """A conversion as plain data."""
    return {
        "schema": SCHEMA,
        "kind": "conversion",
        "plugins": plugins.identity,
        "digest": plugins.digest,
        "converters": [offer.spec.name for offer in plan.offers],
        "rows": plan_rows(plan),
        "untouched": plan.untouched,
        "calls_per_forward": result.calls_per_forward,
    }


def log_result(
    plan: ConversionPlan, result: ConversionResult, plugins: PluginSet, logger: logging.Logger
) -> None:
    """Log what was done: a few lines at INFO, one line per module at DEBUG."""
    logger.info("[converter] %s", plugin_line(plugins))
    for line in summary_lines(plan):
        logger.info("[converter] %s", line)
    for name, number in sorted(result.calls_per_forward.items()):
        logger.info("[converter] %s: %d calls per forward", name, number)
    for row in plan.rows:
        logger.debug(
            "[converter] %s: %s %s %s", row.converter, row.state, row.fqn, row.reason or row.note
        )
