"""torchtitan's unmodified trainer on device npu, through torchrun, against the same job on a CPU.

Every run starts from the parameters of one checkpoint, made on the CPU: the two devices draw other
random numbers.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.trainer.conftest import shared_options  # noqa: F401
from tests.trainer.harness import free_ports, run_cases
from torchtitan_npu_core.testing.virtual_npu import without

pytestmark = pytest.mark.slow

MODELS = ("llama3", "qwen3", "deepseek_v3")
LAYOUTS = {
    "one rank": (1, []),
    "FSDP 2": (2, []),
    "TP 2": (2, ["--parallelism.tensor_parallel_degree", "2"]),
}
CONVERTERS = {"stock": [], "converted": ["--model.converters", "npu_rms_norm,npu_rope"]}
NORMS = {"llama3": 13, "qwen3": 33, "deepseek_v3": 19}
STEP = re.compile(r"step:\s+(\d+)\s+loss:\s+([\d.]+)\s+grad_norm:\s+([\d.]+)")
ROOT = Path(__file__).parents[2]


def job(model):
    return [
        "--model.name", model, "--model.flavor", "debugmodel_untied",
        "--experimental.custom_import", "tests.virtual_npu.flavors",
    ]  # fmt: skip


def from_seed(folder):
    return [
        "--checkpoint.enable",
        "--checkpoint.initial_load_path", str(folder / "checkpoint" / "step-0"),
    ]  # fmt: skip


@pytest.fixture(scope="module")
def seeds(tmp_path_factory):
    return {model: tmp_path_factory.mktemp(f"seed-{model}") for model in MODELS}


@pytest.fixture(scope="module")
def cpu(seeds, shared_options, tmp_path_factory):  # noqa: F811
    """Loss and gradient norm per step on CPUs, by model and layout."""
    make = {
        f"{model} seed": {
            "args": [
                *job(model),
                *("--checkpoint.enable", "--checkpoint.create_seed_checkpoint"),
                *("--job.dump_folder", str(folder)),
            ]
        }
        for model, folder in seeds.items()
    }
    found = {}
    for layout, (nproc, options) in LAYOUTS.items():
        if layout == "TP 2":
            continue  # the same global batch as on one rank
        dump = tmp_path_factory.mktemp("cpu")
        train = {
            model: {
                "args": [
                    *job(model),
                    *options,
                    *from_seed(folder),
                    *("--job.dump_folder", str(dump / model)),
                ]
            }
            for model, folder in seeds.items()
        }
        cases = train if found else {**make, **train}
        seen = run_cases(nproc, cases, shared_options, env=without(os.environ))[0]
        for model in MODELS:
            assert "error" not in seen[model], seen[model]
            found[model, layout] = seen[model]["loss"], seen[model]["grad_norm"]
    for model in MODELS:
        found[model, "TP 2"] = found[model, "one rank"]
    return found


def torchrun(nproc, args):
    """Run the host's trainer, return its output."""
    done = subprocess.run(
        [
            sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(nproc),
            "--master-port", str(free_ports(1)), "-m", "torchtitan.train", *args,
        ],
        cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True,
        timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    return done.stdout + done.stderr


def steps(output):
    """Loss and gradient norm per step; what several ranks print must be one."""
    rows = {(int(s), float(loss), float(norm)) for s, loss, norm in STEP.findall(output)}
    assert [row[0] for row in sorted(rows)] == [1, 2, 3], output[-3000:]
    return [row[1] for row in sorted(rows)], [row[2] for row in sorted(rows)]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model", MODELS)
def test_losses_equal_the_cpu_run(model, layout, seeds, cpu, shared_options, tmp_path):  # noqa: F811
    nproc, options = LAYOUTS[layout]
    want_loss, want_norm = cpu[model, layout]
    for kind, converters in CONVERTERS.items():
        output = torchrun(
            nproc,
            [*shared_options, *job(model), *options, *converters, *from_seed(seeds[model]),
             "--job.dump_folder", str(tmp_path / kind), "--metrics.disable_color_printing"],
        )  # fmt: skip
        assert "Ascend910B1" in output
        loss, norm = steps(output)
        # printed with five and four decimals
        assert loss == pytest.approx(want_loss, rel=1e-5, abs=1e-5), kind
        assert norm == pytest.approx(want_norm, rel=1e-3, abs=1e-4), kind
        assert (tmp_path / kind / "checkpoint" / "step-3" / ".metadata").is_file()
        report = tmp_path / kind / "conversion.json"
        if kind == "stock":
            assert not report.exists()
        else:
            calls = json.loads(report.read_text())["calls_per_forward"]
            assert calls["npu::npu_rms_norm"] == NORMS[model]
