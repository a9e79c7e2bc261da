"""Collectives between ranks on device npu."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.trainer.harness import free_ports
from tests.virtual_npu.ranks import CHECKS
from torchtitan_npu_core.testing import virtual_npu

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


def torchrun(nproc, *command, env=None):
    return subprocess.run(
        [
            sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(nproc),
            "--master-port", str(free_ports(1)), *command,
        ],
        cwd=ROOT, capture_output=True, text=True, timeout=120,
        env={**virtual_npu.environment(devices=nproc), "OMP_NUM_THREADS": "1",
             "HCCL_EXEC_TIMEOUT": "20", **(env or {})},
    )  # fmt: skip


@pytest.fixture(scope="module")
def failed(tmp_path_factory):
    """What failed, by number of ranks, per rank."""
    found = {}
    for nproc in (2, 4):
        out = tmp_path_factory.mktemp("ranks") / "out"
        done = torchrun(nproc, "-m", "tests.virtual_npu.ranks", str(out))
        assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
        found[nproc] = [json.loads(Path(f"{out}.{r}").read_text()) for r in range(nproc)]
    return found


@pytest.mark.parametrize("nproc", [2, 4])
@pytest.mark.parametrize("name", CHECKS)
def test_ranks(name, nproc, failed):
    for rank, problems in enumerate(failed[nproc]):
        assert name not in problems, f"rank {rank}: {problems[name]}"
