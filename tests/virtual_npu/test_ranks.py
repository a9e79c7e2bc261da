"""Collectives between ranks on device npu."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.trainer.harness import free_ports
from tests.virtual_npu.ranks import CHECKS
from torchtitan_npu_core.testing import virtual_npu

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


def start(*command, devices, **variables):
    env = virtual_npu.environment(devices=devices) | {"OMP_NUM_THREADS": "1"} | variables
    return subprocess.Popen(
        [sys.executable, *command],
        cwd=ROOT,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.fixture(scope="module")
def failed(tmp_path_factory):
    """What failed, by number of ranks, per rank."""
    found = {}
    for n in (2, 4):
        out = tmp_path_factory.mktemp("ranks") / "out"
        process = start(
            *("-m", "torch.distributed.run", "--nproc-per-node", str(n)),
            *("--master-port", str(free_ports(1)), "-m", "tests.virtual_npu.ranks", str(out)),
            devices=n,
            HCCL_EXEC_TIMEOUT="20",
        )
        output, _ = process.communicate(timeout=120)
        assert process.returncode == 0, output[-6000:]
        found[n] = [json.loads(Path(f"{out}.{r}").read_text()) for r in range(n)]
    return found


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("name", CHECKS)
def test_between_ranks(name, n, failed):
    for rank, problems in enumerate(failed[n]):
        assert name not in problems, f"rank {rank}: {problems[name]}"


@pytest.fixture(scope="module")
def apart(tmp_path_factory):
    """Error per rank, by case."""
    out, port = tmp_path_factory.mktemp("apart") / "out", str(free_ports(1))
    ranks = [
        start(
            *("-m", "tests.virtual_npu.ranks_apart", str(out)),
            devices=2,
            HCCL_EXEC_TIMEOUT="3",
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=port,
            WORLD_SIZE="2",
            RANK=str(r),
        )
        for r in range(2)
    ]
    # the other rank first: it has ended for good only when its parent knows
    outputs = [rank.communicate(timeout=60)[0] for rank in reversed(ranks)]
    assert [rank.returncode for rank in ranks] == [0, 7], outputs
    return [json.loads(Path(f"{out}.{r}").read_text()) for r in range(2)]


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("late", ("waited HCCL_EXEC_TIMEOUT, 3 s", None)),
        (
            "other collective",
            ("rank 1 is in another collective", "rank 0 is in another collective"),
        ),
        ("other length", ("rank 1 reduces another number of elements",) * 2),
        ("message of another length", ("rank 1 has another length than expected", None)),
        ("ended", ("rank 1 has ended", None)),
    ],
)
def test_ranks_that_do_not_do_the_same_get_an_error(case, words, apart):
    for seen, expected in zip(apart, words, strict=True):
        if expected is None:
            assert case not in seen
        else:
            assert expected in seen[case]
