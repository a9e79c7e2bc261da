"""The command line: ``torchtitan-npu``. One module per command, imported when it is used."""

from __future__ import annotations

import importlib
import sys
from typing import Any

import click

from torchtitan_npu_core.__about__ import __version__
from torchtitan_npu_core.errors import ConverterError

COMMANDS = ("list", "doctor", "explain", "plan", "train", "virtual-npu")


class _Commands(click.Group):
    """Loads a command's module when the command is named, so that the others cost nothing."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        # not list(): once its module is loaded, 'list' here is the command
        return [*COMMANDS]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module = cmd_name.replace("-", "_")
        return importlib.import_module(f"torchtitan_npu_core.cli.{module}").command

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except ConverterError as error:
            click.echo(f"torchtitan-npu: {error}", err=True)
            ctx.exit(1)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="torchtitan-npu")
def main() -> None:
    """Ascend NPU fused operators for torchtitan jobs, by name.

    Exit codes: 0 fine, 1 found a problem, 2 wrong usage.
    """


if __name__ == "__main__":
    sys.exit(main())
