"""The command line where torch_npu is alive, with converters that fit and one that does not."""

import os
import subprocess
import sys

import pytest

from torchtitan_npu_core.testing import write_distribution

PLUGIN = """
from torchtitan_npu_core import ConverterSpec, OperatorSpec, hookimpl

@hookimpl
def torchtitan_npu_converters():
    return [ConverterSpec(
        name="acme_swiglu", summary="s", replaces=(), factory="acme_swiglu:None",
        operators=("npu::npu_swiglu",),
    )]

@hookimpl
def torchtitan_npu_operators():
    return [OperatorSpec(
        name="npu::npu_swiglu", schema="npu_swiglu(Tensor input, Tensor limit) -> Tensor",
        kernels="torchtitan_npu_op_norm_rope.ops:RMS_NORM",
    )]
"""
ENTRY = "[torchtitan_npu.converters]\nswiglu = acme_swiglu\n"
REFUSED = "npu::npu_swiglu: argument 2 is dim, the call gives limit"


def run(*command, path=()):
    path = os.pathsep.join([*map(str, path), os.environ["PYTHONPATH"]])
    return subprocess.run(
        [sys.executable, *command],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )


@pytest.fixture(scope="module")
def misfit(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    write_distribution(folder, "acme-swiglu", entry_points=ENTRY, modules={"acme_swiglu": PLUGIN})
    return folder


def test_doctor_finds_that_everything_fits():
    done = run("-m", "torchtitan_npu_core", "doctor")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "generation E" in done.stdout
    assert "family a2: Atlas A2" in done.stdout
    assert done.stdout.count("its 2 operators fit torch_npu 2.13.0") == 2


def test_doctor_says_what_does_not_fit(misfit):
    done = run("-m", "torchtitan_npu_core", "doctor", path=[misfit])
    assert done.returncode == 1
    line = next(x for x in done.stdout.splitlines() if "converter acme_swiglu" in x)
    assert line.startswith("problem")
    assert f"does not fit torch_npu 2.13.0: {REFUSED}. No known release fits" in line
    assert done.stdout.count("its 2 operators fit") == 2


def test_job_that_asks_for_it_is_refused(misfit):
    ask = "from torchtitan_npu_core.operators import register_converter_operators as r; r({!r})"
    done = run("-c", ask.format("acme_swiglu"), path=[misfit])
    assert "OperatorVersionError: npu::npu_swiglu cannot be called with torch_npu" in done.stderr
    assert run("-c", ask.format("npu_rope"), path=[misfit]).returncode == 0
