"""Every distribution built, installed away from the checkout, and used through its commands."""

import json
import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = {
    "torchtitan-npu-core": ROOT / "packages/core",
    "torchtitan-npu-op-norm-rope": ROOT / "packages/op-norm-rope",
    "acme-torchtitan-npu-gelu": ROOT / "examples/acme-scaled-gelu",
}
TORCH = ["torch==2.13.0", "torchtitan==0.2.2", "triton", "tokenizers", "numpy"]

pytestmark = [pytest.mark.wheels, pytest.mark.slow]


def run(*command, cwd, check=True, **env):
    # nothing of the checkout on any path
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PIP_CONSTRAINT")}
    done = subprocess.run(
        [str(c) for c in command],
        cwd=cwd,
        env={**environment, **env},
        capture_output=True,
        text=True,
        timeout=1200,
    )
    if check and done.returncode:
        raise AssertionError(
            f"{command}: {done.returncode}\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
        )
    return done


@pytest.fixture(scope="session")
def wheels(tmp_path_factory):
    """Wheels built from copies of the source folders, so that nothing lands in the checkout."""
    out = tmp_path_factory.mktemp("wheels")
    for name, source in SOURCES.items():
        copy = tmp_path_factory.mktemp("source") / name
        shutil.copytree(source, copy, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
        run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "-o", out, copy, cwd=out)
    return {name: next(out.glob(f"{name.replace('-', '_')}-*.whl")) for name in SOURCES}


class Environment:
    """A virtual environment with wheels in it."""

    def __init__(self, folder, python=None):
        self.folder = folder
        if python is None:
            venv.create(folder, with_pip=True)
        else:
            run(python, "-m", "venv", folder, cwd=folder.parent)
        self.bin = folder / "bin"

    def pip(self, *args):
        return run(
            self.bin / "python", "-m", "pip", "--disable-pip-version-check", *args, cwd=self.folder
        )

    def npu(self, *args, check=True, **env):
        return run(self.bin / "torchtitan-npu", *args, cwd=self.folder, check=check, **env)


def interpreters():
    found = {"3.11": sys.executable}
    for version in ("3.10", "3.12", "3.13"):
        path = shutil.which(f"python{version}")
        if path and not subprocess.run([path, "-c", ""], capture_output=True).returncode:
            found[version] = path
    return found


def test_wheel_contents(wheels):
    import zipfile

    for name, wheel in wheels.items():
        names = zipfile.ZipFile(wheel).namelist()
        assert any(n.endswith("py.typed") for n in names), name
        assert any(n.endswith("LICENSE") for n in names), name
        assert not [n for n in names if n.startswith(("tests", "torchtitan_npu/"))], name
    core = zipfile.ZipFile(wheels["torchtitan-npu-core"]).namelist()
    for data in ("schemas/E.json", "testing/virtual_npu/hccl.c", "testing/virtual_npu/common.h"):
        assert f"torchtitan_npu_core/{data}" in core
    assert "torchtitan_npu_core/configs/quickstart.toml" in core


@pytest.mark.parametrize("version", interpreters())
def test_core_without_torch_installs_and_lists(version, wheels, tmp_path):
    env = Environment(tmp_path / "v", interpreters()[version])
    env.pip("install", "-q", wheels["torchtitan-npu-core"])
    assert "No converters are installed" in env.npu("list").stdout
    # an op package brings nothing but core with it, and goes again
    env.pip("install", "-q", wheels["torchtitan-npu-op-norm-rope"])
    rows = json.loads(env.npu("list", "--json").stdout)["rows"]
    assert {r["converter"] for r in rows} == {"npu_rms_norm", "npu_rope"}
    assert "npu_rotary_mul" in env.npu("explain", "npu_rope").stdout
    assert env.npu("doctor").returncode == 0
    assert "torch " not in env.pip("list", "--format", "freeze").stdout.replace("==", " ")
    env.pip("uninstall", "-q", "-y", "torchtitan-npu-op-norm-rope")
    assert json.loads(env.npu("list", "--json").stdout)["rows"] == []
    gone = env.npu("explain", "npu_rope", check=False)
    assert gone.returncode == 1
    assert "pip install torchtitan-npu-op-norm-rope" in gone.stderr


@pytest.fixture(scope="session")
def full(wheels, tmp_path_factory):
    env = Environment(tmp_path_factory.mktemp("full") / "v")
    env.pip("install", "-q", *TORCH, *wheels.values())
    return env


def test_commands_of_installed_wheels(full):
    assert full.npu("doctor").returncode == 0
    plan = json.loads(full.npu("plan", "quickstart", "--json").stdout)
    assert plan["calls_per_forward"] == {"npu::npu_rms_norm": 19, "npu::npu_rotary_mul": 12}
    assert plan["problems"] == []
    states = {
        r["converter"]: r["state"] for r in json.loads(full.npu("list", "--json").stdout)["rows"]
    }
    assert states["acme_scaled_gelu"] == "loaded"


def test_training_from_installed_wheels(full):
    done = full.npu(
        "train",
        "quickstart",
        "--training.steps",
        "3",
        "--training.seq_len",
        "64",
        "--job.dump_folder",
        full.folder / "out",
    )
    converted, loss, following = done.stdout.splitlines()[-3:]
    assert converted.startswith("converted: npu_rms_norm 19 modules, npu_rope 6 modules; 31 fused")
    assert loss.startswith("loss: ")
    assert following.startswith("next: torchtitan-npu plan quickstart")
    rows = [json.loads(x) for x in (full.folder / "out/metrics.jsonl").read_text().splitlines()]
    assert [r["step"] for r in rows] == [1, 2, 3]
    assert json.loads((full.folder / "out/conversion.json").read_text())["schema"] == 1


def test_failing_rank_ends_everything_with_one_readable_error(full):
    # two ranks cannot share three: the host refuses on every rank
    done = full.npu(
        "train",
        "quickstart",
        "--nproc",
        "2",
        "--parallelism.tensor_parallel_degree",
        "3",
        check=False,
    )
    assert done.returncode == 1
    assert "torchtitan-npu: rank" in done.stderr
    assert "all ranks were ended" in done.stderr


def test_config_error_is_one_line_not_a_traceback(full):
    done = full.npu("train", "quickstart", "--model.converters", "npu_ropes", check=False)
    assert done.returncode == 1
    assert "Did you mean 'npu_rope'" in done.stderr
    assert "Traceback" not in done.stderr
    done = full.npu(
        "train", "quickstart", "--nproc", "2", "--model.converters", "npu_ropes", check=False
    )
    assert done.returncode == 1
    assert "Did you mean 'npu_rope'" in done.stderr


def test_interrupt_ends_all_ranks(full):
    import signal
    import time

    process = subprocess.Popen(
        [
            full.bin / "torchtitan-npu",
            "train",
            "quickstart",
            "--nproc",
            "2",
            "--training.steps",
            "1000",
            "--training.seq_len",
            "64",
            "--job.dump_folder",
            full.folder / "interrupted",
        ],
        cwd=full.folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    metrics = full.folder / "interrupted" / "metrics.jsonl"
    deadline = time.monotonic() + 300
    while not (metrics.is_file() and metrics.read_text()):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "interrupted" in stderr
    left = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True).stdout
    assert str(full.folder / "interrupted") not in left
