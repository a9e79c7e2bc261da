"""``torchtitan-npu virtual-npu``: run a program on NPUs that this machine does not have."""

from __future__ import annotations

import os
import shutil

import click

from torchtitan_npu_core.errors import CommandError
from torchtitan_npu_core.report import to_json
from torchtitan_npu_core.specs import DEVICE_FAMILIES


@click.command("virtual-npu", context_settings={"ignore_unknown_options": True})
@click.option(
    "--device",
    "family",
    type=click.Choice(tuple(DEVICE_FAMILIES)),
    default="a2",
    show_default=True,
    help="Device family whose name and limits the devices have.",
)
@click.option(
    "--devices",
    type=click.IntRange(1, 64),
    default=2,
    show_default=True,
    help="Number of devices, npu:0 and on.",
)
@click.option(
    "--json",
    "as_json",
    is_flag=True,
    help="Print the environment that COMMAND would get as JSON, and run nothing.",
)
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
def command(family: str, devices: int, as_json: bool, command: tuple[str, ...]) -> None:
    """Run COMMAND with the real torch_npu on devices whose memory is host memory.

    For tests: numbers are the CPU's and nothing is fast. Needs torch_npu and gcc. Separate COMMAND
    with --, as in: torchtitan-npu virtual-npu -- python job.py
    """
    from torchtitan_npu_core.testing.virtual_npu import environment

    if not command and not as_json:
        raise click.UsageError("Missing argument 'COMMAND...', as in: virtual-npu -- python job.py")
    env = environment(family=family, devices=devices)
    if as_json:
        changed = {name: value for name, value in env.items() if os.environ.get(name) != value}
        removed = sorted(name for name in os.environ if name not in env)
        click.echo(to_json("virtual-npu", {"set": changed, "unset": removed}))
        return
    program = shutil.which(command[0], path=env.get("PATH"))
    if program is None:
        raise CommandError(f"no program {command[0]!r} on PATH")
    os.execve(program, list(command), env)
