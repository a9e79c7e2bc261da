"""torchtitan's unmodified trainer on device npu, through torchrun, against the same job on a CPU.

Every run starts from the parameters of one checkpoint, made on the CPU: the two devices draw other
random numbers.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
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
RUNS = [(m, layout, kind) for m in MODELS for layout in LAYOUTS for kind in CONVERTERS]


def options(model, layout="one rank", kind="stock"):
    return [
        "--model.name", model, "--model.flavor", "debugmodel_untied",
        "--experimental.custom_import", "tests.virtual_npu.flavors", "--checkpoint.enable",
        *LAYOUTS[layout][1], *CONVERTERS[kind],
    ]  # fmt: skip


@pytest.fixture(scope="module")
def seeds(tmp_path_factory):
    return {model: tmp_path_factory.mktemp(f"seed-{model}") for model in MODELS}


def from_seed(folder):
    return ["--checkpoint.initial_load_path", str(folder / "checkpoint" / "step-0")]


@pytest.fixture(scope="module")
def cpu(seeds, shared_options, tmp_path_factory):  # noqa: F811
    """Loss and gradient norm per step on CPUs, by model and layout."""
    dump, found = tmp_path_factory.mktemp("cpu"), {}
    make = {
        f"{model} seed": [
            *options(model), "--checkpoint.create_seed_checkpoint", "--job.dump_folder", str(folder)
        ]
        for model, folder in seeds.items()
    }  # fmt: skip
    for nproc in (1, 2):
        # every layout has its own numbers: the host's tensor parallelism gives the routers of
        # deepseek_v3 another gradient than one rank, on any device
        train = {
            f"{model} {layout}": [
                *options(model, layout), *from_seed(folder),
                "--job.dump_folder", str(dump / model / layout),
            ]
            for model, folder in seeds.items()
            for layout in LAYOUTS if LAYOUTS[layout][0] == nproc
        }  # fmt: skip
        cases = {name: {"args": args} for name, args in {**make, **train}.items()}
        make = {}
        seen = run_cases(nproc, cases, shared_options, env=without(os.environ))[0]
        assert not [case for case in seen.values() if "error" in case], seen
        found |= {name: (seen[name]["loss"], seen[name]["grad_norm"]) for name in train}
    return found


def torchrun(run, args, shared, dump):
    """Run the host's trainer, return its output."""
    nproc = LAYOUTS[run[1]][0]
    done = subprocess.run(
        [
            sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(nproc),
            "--master-port", str(free_ports(1)), "-m", "torchtitan.train", *shared, *options(*run),
            *args, "--checkpoint.interval", "2", "--metrics.disable_color_printing",
            "--job.dump_folder", str(dump),
        ],
        cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True,
        timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def npu(request, cpu, seeds, shared_options, tmp_path_factory):  # noqa: F811
    """Dump folder and output, to come, of every run that a selected test looks at."""
    wanted = [item.callspec.params["run"] for item in request.session.items if uses_npu(item)]
    # half of a run is waiting: for imports, for other ranks, for the two seconds at its end
    with ThreadPoolExecutor(2) as pool:
        found = {}
        for run in dict.fromkeys(wanted):
            dump = tmp_path_factory.mktemp("npu")
            args = from_seed(seeds[run[0]])
            found[run] = dump, pool.submit(torchrun, run, args, shared_options, dump)
        yield found
        pool.shutdown(cancel_futures=True)


def uses_npu(item):
    return item.path == Path(__file__) and "npu" in item.fixturenames


def steps(output):
    """Loss and gradient norm by step; what several ranks print must be one."""
    rows = sorted({(int(s), float(loss), float(norm)) for s, loss, norm in STEP.findall(output)})
    assert len({row[0] for row in rows}) == len(rows) > 0, output[-3000:]
    return {step: (loss, norm) for step, loss, norm in rows}


@pytest.mark.parametrize("run", RUNS, ids="-".join)
def test_losses_equal_the_cpu_run(run, npu, cpu):
    model, layout, kind = run
    dump, output = npu[run][0], npu[run][1].result()
    assert "Ascend910B1" in output
    assert list(steps(output)) == [1, 2, 3]
    for (loss, norm), want_loss, want_norm in zip(
        steps(output).values(), *cpu[f"{model} {layout}"], strict=True
    ):
        # printed with five and four decimals
        assert loss == pytest.approx(want_loss, rel=1e-5, abs=1e-5)
        assert norm == pytest.approx(want_norm, rel=1e-3, abs=1e-4)
    assert (dump / "checkpoint" / "step-3" / ".metadata").is_file()
    report = dump / "conversion.json"
    if kind == "stock":
        assert not report.exists()
    else:
        calls = json.loads(report.read_text())["calls_per_forward"]
        assert calls["npu::npu_rms_norm"] == NORMS[model]


@pytest.mark.parametrize("run", [("deepseek_v3", "FSDP 2", "converted")], ids="-".join)
def test_a_resumed_job_goes_on_where_it_was(run, npu, shared_options, tmp_path):  # noqa: F811
    dump, output = npu[run][0], npu[run][1].result()
    shutil.copytree(dump / "checkpoint" / "step-2", tmp_path / "checkpoint" / "step-2")
    resumed = torchrun(run, [], shared_options, tmp_path)
    assert steps(resumed) == {3: steps(output)[3]}
