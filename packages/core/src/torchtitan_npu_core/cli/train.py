"""``torchtitan-npu train CONFIG``: run the job with torchtitan's own trainer."""

from __future__ import annotations

import json
import os
import shlex
import sys
import time
from pathlib import Path
from typing import Any

import click

from torchtitan_npu_core import assets
from torchtitan_npu_core.configs import check_config, find_config, read_toml, setting


def asset_options(config: dict[str, Any], options: tuple[str, ...]) -> list[str]:
    """Options that point at made text and tokenizer, where the config asks for them."""
    found = []
    for section, key, make in (
        ("model", "hf_assets_path", assets.tokenizer_folder),
        ("training", "dataset_path", assets.text_folder),
    ):
        name = f"{section}.{key}"
        if setting(config, options, name, None) == assets.NAME:
            found += [f"--{name}", str(make())]
    return found


def closing_lines(folder: Path, started: float, config: str) -> list[str]:
    """What was converted, what the loss did, what to try next; from the files the run left."""

    def fresh(name: str) -> Path | None:
        path = folder / name
        return path if path.is_file() and path.stat().st_mtime >= started - 1 else None

    lines = []
    conversion = fresh("conversion.json")
    if not str(folder).strip("."):
        lines.append("converted: see the log, there is no dump folder for a report")
    elif conversion is not None:
        data = json.loads(conversion.read_text())
        counts = {name: 0 for name in data["converters"]}
        for row in data["rows"]:
            counts[row["converter"]] += row["state"] == "replaced"
        listed = ", ".join(f"{name} {number} modules" for name, number in counts.items())
        calls = sum(data["calls_per_forward"].values())
        lines.append(f"converted: {listed}; {calls} fused operator calls per forward")
    else:
        lines.append("converted: nothing, the config names no converter of ours")
    metrics = fresh("metrics.jsonl")
    key = "loss_metrics/global_avg_loss"
    # validation logs rows of its own
    logged = [json.loads(x) for x in metrics.read_text().splitlines()] if metrics else []
    rows = [row for row in logged if key in row]
    if rows:
        first, last = rows[0], rows[-1]
        steps = f"from step {first['step']} to step {last['step']}"
        lines.append(f"loss: {first[key]:.4f} -> {last[key]:.4f} {steps} ({metrics})")
    lines.append(
        f"next: torchtitan-npu plan {shlex.quote(config)} shows every module; "
        f"torchtitan-npu train {shlex.quote(config)} --model.converters= trains without converters"
    )
    return lines


def _shown_rank(config: dict[str, Any], options: tuple[str, ...], nproc: int) -> int:
    """Rank that prints the loss: the first one of the last pipeline stage."""
    stages = int(setting(config, options, "parallelism.pipeline_parallel_degree", 1))
    schedule = setting(config, options, "parallelism.pipeline_parallel_schedule", "")
    if not 1 < stages <= nproc or schedule == "ZBVZeroBubble":
        return 0
    return (nproc // stages) * (stages - 1)


@click.command("train", context_settings={"ignore_unknown_options": True})
@click.argument("config")
@click.option(
    "--nproc",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Processes on this machine.",
)
@click.option(
    "--json",
    "as_json",
    is_flag=True,
    help="Print the closing report as JSON (log lines go to standard error).",
)
@click.argument("options", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def command(
    ctx: click.Context, config: str, nproc: int, as_json: bool, options: tuple[str, ...]
) -> None:
    """Train the job of CONFIG, a TOML file or a shipped config (see list --configs).

    Further OPTIONS are torchtitan's, e.g. --training.steps 5.
    """
    path = find_config(config)
    check_config(path, options)
    values = read_toml(path)
    args = ["--job.config_file", str(path), *asset_options(values, options), *options]
    started = time.time()
    report = sys.stdout
    if as_json:
        # the trainer logs to standard output; keep that for the report
        report = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)
    if nproc == 1:
        code = _train_here(args)
    else:
        from torchtitan_npu_core.launch import launch

        code = launch(args, nproc, _shown_rank(values, options, nproc))
    if code != 0:
        if as_json:
            report.write(json.dumps({"schema": 1, "kind": "train", "exit_code": code}) + "\n")
            report.close()
    else:
        folder = Path(setting(values, options, "job.dump_folder", "./outputs"))
        lines = closing_lines(folder, started, config)
        if as_json:
            data = {"exit_code": 0, **dict(line.split(": ", 1) for line in lines)}
            report.write(json.dumps({"schema": 1, "kind": "train", **data}) + "\n")
            report.close()
        else:
            sys.stdout.flush()
            click.echo("\n".join(lines))
    ctx.exit(code)


def _train_here(args: list[str]) -> int:
    from torchtitan_npu_core import worker

    try:
        return worker.main(args)
    except KeyboardInterrupt:
        click.echo("torchtitan-npu: interrupted", err=True)
        return 130
