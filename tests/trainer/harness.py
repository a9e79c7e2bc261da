"""Real trainer runs for tests: many jobs, one after the other, in the same set of processes.

    python -m tests.trainer.harness CASES.json OUT_PREFIX      (one process per rank)

Each case is a list of torchtitan options. Every rank writes what it saw, loss and gradient norm per
step, operator calls and table derivations, to ``OUT_PREFIX.<rank>.json``.
"""

import copy
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from time import sleep as pause
from unittest import mock

LOSS, NORM = "loss_metrics/global_avg_loss", "grad_norm"


def add_tiny_flavors():
    """Give every host model a flavor ``tiny`` (and ``tiny_<variant>``)."""
    from torchtitan.protocols.train_spec import get_train_spec

    from tests import tiny

    for family in tiny.FAMILIES:
        name = tiny.host_name(family)
        flavors = get_train_spec(name).model_args
        variant = family.removeprefix(name)
        base = flavors[tiny.FLAVORS.get(family, "debugmodel")]
        args = tiny.shrink(copy.deepcopy(base), family)
        if hasattr(args, "enable_weight_tying"):
            # the host cannot shard tied weights
            args.enable_weight_tying = False
        flavors[f"tiny{variant}"] = args
        if name == "llama3":
            flex = tiny.shrink(copy.deepcopy(flavors["debugmodel_flex_attn"]), family)
            flavors["tiny_flex"] = flex


def one(args, shared, inspect):
    from torchtitan_npu_core import worker
    from torchtitan_npu_core.probe import OperatorProbe

    seen = {}

    def before_train(trainer):
        seen["trainer"] = trainer
        train_step = trainer.train_step

        def counted(data):
            with OperatorProbe() as probe:
                train_step(data)
            seen.setdefault("calls", []).append(dict(probe.counts))

        if inspect:
            trainer.train_step = counted

    # the host sleeps two seconds at the end of every run for ranks that are late
    with mock.patch("time.sleep", lambda seconds: pause(min(seconds, 0.2))):
        rows = worker.run([*shared, *args], before_train)
    result = {
        "loss": [row[LOSS] for row in rows if LOSS in row],
        "grad_norm": [row[NORM] for row in rows if NORM in row],
        "row": rows[-1] if rows else {},
        "calls": seen.get("calls"),
        "derivations": [
            part.__dict__["_torchtitan_npu_rotary_tables"].num_derivations
            for part in seen["trainer"].model_parts
            if "_torchtitan_npu_rotary_tables" in part.__dict__
        ],
    }
    return result


def main(cases_file, prefix):
    import torch

    from torchtitan_npu_core import cpu_device

    cpu_device.install()
    rank = int(os.environ["RANK"])
    port = int(os.environ["MASTER_PORT"])
    plan = json.loads(Path(cases_file).read_text())
    add_tiny_flavors()
    results = {}
    for i, (name, case) in enumerate(plan["cases"].items()):
        os.environ["MASTER_PORT"] = str(port + i)
        torch._dynamo.reset()
        try:
            results[name] = one(case["args"], plan["shared"], case.get("inspect", False))
        except BaseException as error:
            traceback.print_exc()
            results[name] = {"error": f"{type(error).__name__}: {error}"}
            if not isinstance(error, Exception):
                raise
        Path(f"{prefix}.{rank}.json").write_text(json.dumps(results))


def free_ports(count):
    """First of ``count`` neighbouring ports that are free now, at a random place.

    Below the range that the system hands out by itself, and random, because other tests of this
    run look for ports at the same time.
    """
    for _ in range(1000):
        start = random.SystemRandom().randrange(10000, 32000 - count)
        try:
            for port in range(start, start + count):
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", port))
        except OSError:
            continue
        return start
    raise RuntimeError("no free ports")


def run_cases(nproc, cases, shared, timeout=900, env=None):
    """Run cases on ``nproc`` ranks; results per rank, per case.

    Args:
        nproc: Ranks.
        cases: ``{name: {"args": [...], "inspect": bool}}``.
        shared: Options that all cases have.
        timeout: Seconds for all of them together.
        env: Environment of the ranks; this process's by default.
    """
    folder = Path(tempfile.mkdtemp(prefix="trainer-"))
    (folder / "cases.json").write_text(json.dumps({"cases": cases, "shared": shared}))
    port = free_ports(len(cases) + 1)
    processes = []
    for rank in range(nproc):
        variables = {
            **(os.environ if env is None else env),
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(nproc),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // nproc)),
            "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
        }
        command = [
            sys.executable,
            "-m",
            "tests.trainer.harness",
            folder / "cases.json",
            folder / "out",
        ]
        with open(folder / f"log.{rank}", "w") as log:
            processes.append(
                subprocess.Popen(
                    command,
                    env=variables,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    cwd=Path(__file__).parents[2],
                )
            )
    try:
        codes = [process.wait(timeout) for process in processes]
    finally:
        for process in processes:
            process.kill()
    logs = {r: (folder / f"log.{r}").read_text()[-4000:] for r in range(nproc)}
    assert not any(codes), logs
    return [json.loads((folder / f"out.{rank}.json").read_text()) for rank in range(nproc)]


if __name__ == "__main__":
    main(*sys.argv[1:])
