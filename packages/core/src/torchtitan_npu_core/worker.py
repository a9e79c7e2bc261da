"""One rank of ``torchtitan-npu train``: torchtitan's own trainer, and what a CPU needs beside it.

python -m torchtitan_npu_core.worker [torchtitan options]
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torchtitan_npu_core.compat import require_torch
from torchtitan_npu_core.errors import CommandError, ConverterError

logger = logging.getLogger(__name__)

DEVICE_CONVERTER = "torchtitan_npu_device"
"""Name under which the launcher prepares a model for this device, in the host's conversion step."""


class RecordingLogger:
    """Passes metrics on to the host's logger and keeps them in a file, one JSON object a line.

    Args:
        inner: The host's metrics logger.
        path: File to write, or None on ranks that do not record.
    """

    def __init__(self, inner: Any, path: str | None) -> None:
        self.inner = inner
        self.rows: list[dict[str, Any]] = []
        # line buffered: a run that dies leaves every step it finished
        self.file = open(path, "w", buffering=1) if path else None  # noqa: SIM115

    def log(self, metrics: Mapping[str, Any], step: int) -> None:
        """Record one step's metrics."""
        row = {"step": step, **{k: v for k, v in metrics.items() if isinstance(v, int | float)}}
        self.rows.append(row)
        if self.file is not None:
            self.file.write(json.dumps(row) + "\n")
        self.inner.log(metrics, step)

    def close(self) -> None:
        """Close the file and the host's logger."""
        if self.file is not None:
            self.file.close()
            self.file = None
        self.inner.close()


def _register_device_converter() -> None:
    """Register what every job of the launcher needs, converted or not."""
    from torchtitan.protocols import model_converter as host

    from torchtitan_npu_core import cpu_device
    from torchtitan_npu_core.apply import add_root_hook
    from torchtitan_npu_core.cpu_model import prepare_for_cpu
    from torchtitan_npu_core.fsdp import use_sum_reduction

    if DEVICE_CONVERTER in host._registry_model_converter_cls:
        return

    class DeviceConverter(host.ModelConverter):
        def __init__(self, job_config: Any, parallel_dims: Any) -> None:
            pass

        def convert(self, model: Any) -> None:
            if not cpu_device.is_needed():
                add_root_hook(model, use_sum_reduction)
                return
            done = prepare_for_cpu(model)
            listed = ", ".join(f"{k} {v}" for k, v in sorted(done.items())) or "nothing to do"
            logger.info("[cpu] prepared the model for this device: %s", listed)

        def post_optimizer_hook(self, model: Any) -> None:
            pass

    host.register_model_converter(DeviceConverter, DEVICE_CONVERTER)


def _check_for_cpu(config: Any) -> None:
    """Refuse what cannot work without accelerator, before anything is built."""
    if config.profiling.enable_profiling or config.profiling.enable_memory_snapshot:
        raise CommandError(
            "torchtitan's profiler needs an accelerator. Set profiling.enable_profiling and "
            "profiling.enable_memory_snapshot to false."
        )
    schedule = getattr(config.parallelism, "pipeline_parallel_schedule", "")
    if schedule.lower() == "dualpipev":
        raise CommandError("The DualPipeV schedule needs an accelerator. Choose another one.")


def _set_single_process_environment() -> None:
    import socket

    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}.items():
        os.environ.setdefault(name, value)
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    if "MASTER_PORT" not in os.environ:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            os.environ["MASTER_PORT"] = str(probe.getsockname()[1])


def run(args: Sequence[str], before_train: Callable[[Any], None] | None = None) -> list[dict]:
    """Train one job in this process, as one rank of it.

    Args:
        args: torchtitan's command-line options.
        before_train: Called with the constructed trainer.

    Returns:
        Metrics of this rank, one entry per logged step. The rank that sees the loss also writes
        them to ``metrics.jsonl`` in the job's dump folder.

    Raises:
        ConverterError: If the job cannot be started as configured.
    """
    require_torch("Training")  # before torch is imported, for callers that come here directly
    from torchtitan_npu_core import cpu_device
    from torchtitan_npu_core.operators import device_library_problem

    device_library_problem()
    on_cpu = cpu_device.is_needed()
    if on_cpu:
        cpu_device.install()
    _set_single_process_environment()

    import torch
    from torchtitan.config import ConfigManager
    from torchtitan.tools.logging import init_logger
    from torchtitan.train import Trainer

    from torchtitan_npu_core.titan.job import check_model, normalised
    from torchtitan_npu_core.titan.registration import check_names, register

    init_logger()
    config = ConfigManager().parse_args(list(args))
    normalised(config)
    register(list(config.model.converters))
    check_names(config)
    check_model(config)
    if on_cpu:
        _check_for_cpu(config)
    _register_device_converter()
    config.model.converters = [DEVICE_CONVERTER, *config.model.converters]

    trainer: Any = None
    try:
        if on_cpu:
            with cpu_device.true_peak_flops():
                trainer = Trainer(config)
        else:
            trainer = Trainer(config)
        recorder = _record(trainer, config)
        if before_train is not None:
            before_train(trainer)
        if config.checkpoint.create_seed_checkpoint:
            trainer.checkpointer.save(curr_step=0, last_step=True)
        else:
            trainer.train()
        return recorder.rows
    finally:
        if trainer is not None:
            trainer.close()
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def _record(trainer: Any, config: Any) -> RecordingLogger:
    import torch

    from torchtitan_npu_core.titan.job import metrics_rank

    folder, path = config.job.dump_folder, None
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    if folder and rank == metrics_rank(config, size):
        os.makedirs(folder, exist_ok=True)
        path = os.path.join(folder, "metrics.jsonl")
    processor = trainer.metrics_processor
    recorder = RecordingLogger(processor.logger, path)
    processor.logger = recorder
    return recorder


def main(args: Sequence[str] | None = None) -> int:
    """Run one rank; print one readable line for errors that are the user's to mend."""
    try:
        require_torch("Training")
        from torch.distributed.elastic.multiprocessing.errors import record

        record(run)(sys.argv[1:] if args is None else args)
    except ConverterError as error:
        print(f"torchtitan-npu: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
