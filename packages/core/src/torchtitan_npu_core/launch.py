"""Start several ranks of a job on this machine and end them together."""

from __future__ import annotations

import os
import sys
import tempfile
import uuid
from collections.abc import Sequence

import click

from torchtitan_npu_core.compat import require_torch
from torchtitan_npu_core.errors import CommandError


def _first_failure(failures: dict) -> tuple[int, str]:
    """Rank and message of the failure that came first in time."""
    rank, failure = min(failures.items(), key=lambda item: item[1].timestamp)
    message = failure.message
    if isinstance(message, dict):
        message = message.get("message", str(message))
    return rank, str(message).strip()


def launch(args: Sequence[str], nproc: int, shown: int = 0) -> int:
    """Run the worker on ``nproc`` ranks.

    Args:
        args: torchtitan's options.
        nproc: Number of ranks.
        shown: Rank whose output goes to the console; all ranks' output goes to files.

    Returns:
        Exit code: 0, 1 after a failing rank, 130 after an interrupt.
    """
    require_torch("Training")
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    # ranks share the cores; without this each starts as many threads as there are cores
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // nproc)))
    log_folder = tempfile.mkdtemp(prefix="torchtitan-npu-logs-")
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=nproc,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        monitor_interval=0.1,
        start_method="spawn",
        logs_specs=DefaultLogsSpecs(
            log_dir=log_folder,
            redirects=Std.ALL,
            tee={shown: Std.ALL},
        ),
    )
    try:
        elastic_launch(config, sys.executable)("-m", "torchtitan_npu_core.worker", *args)
    except ChildFailedError as error:
        rank, message = _first_failure(error.failures)
        click.echo(
            f"torchtitan-npu: rank {rank} of {nproc} failed, all ranks were ended:\n{message}\n"
            f"Output of every rank: {log_folder}",
            err=True,
        )
        return 1
    except (KeyboardInterrupt, SignalException):
        click.echo("torchtitan-npu: interrupted, all ranks were ended", err=True)
        return 130
    except OSError as error:
        raise CommandError(f"Ranks could not be started: {error}") from error
    return 0
