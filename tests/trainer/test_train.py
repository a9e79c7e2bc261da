"""Real trainer runs on one process: every debug flavor, checkpointing of activations, compile."""

import json
import math

import pytest

from tests.trainer.harness import run_cases

pytestmark = pytest.mark.slow

BOTH = ["--model.converters", "npu_rms_norm,npu_rope"]
# the debug flavors of the host as they are; the mixture-of-experts Qwen3, whose debug flavor takes
# half a minute a step on a CPU, in a smaller size
FLAVORS = {
    "llama3": ("llama3", "debugmodel"),
    "llama4": ("llama4", "debugmodel"),
    "qwen3": ("qwen3", "debugmodel"),
    "qwen3_moe": ("qwen3", "tiny_moe"),
    "deepseek_v3": ("deepseek_v3", "debugmodel"),
    "gpt_oss": ("gpt_oss", "debugmodel"),
}
NORMS = {"llama3": 13, "llama4": 13, "qwen3": 33, "qwen3_moe": 9, "deepseek_v3": 19, "gpt_oss": 9}
ROTATIONS = {
    "llama3": 12,
    "llama4": 12,
    "qwen3": 16,
    "qwen3_moe": 4,
    "deepseek_v3": 12,
    "gpt_oss": 8,
}

AC = {
    "full": ["--activation_checkpoint.mode", "full"],
    "selective-2": [
        "--activation_checkpoint.mode",
        "selective",
        "--activation_checkpoint.selective_ac_option",
        "2",
    ],
    "selective-op": [
        "--activation_checkpoint.mode",
        "selective",
        "--activation_checkpoint.selective_ac_option",
        "op",
    ],
}
AC_FAMILIES = ["llama3", "qwen3", "deepseek_v3"]
COMPILE = {
    backend: ["--compile.enable", "--compile.backend", backend]
    for backend in ("aot_eager", "inductor")
}
ACCUMULATE = ["--training.global_batch_size", "4", "--training.local_batch_size", "2"]


@pytest.fixture(scope="module")
def results(shared_options):
    cases = {}
    for name, (model, flavor) in FLAVORS.items():
        args = ["--model.name", model, "--model.flavor", flavor]
        if name == "gpt_oss":
            # the host builds its blocks in bfloat16: outside FSDP it needs autocast to run at all.
            # Its float32 run is among the layouts of test_parallel
            args += ["--training.mixed_precision_param", "bfloat16"]
        cases[name] = {"args": args}
        cases[f"{name}+converted"] = {"args": args + BOTH, "inspect": True}
    for name in AC_FAMILIES:
        tiny = ["--model.name", name, "--model.flavor", "tiny"]
        cases[f"tiny-{name}"] = {"args": tiny}
        cases[f"tiny-{name}+accumulate"] = {"args": tiny + ACCUMULATE}
        cases[f"tiny-{name}+accumulate+converted"] = {"args": tiny + ACCUMULATE + BOTH}
        for mode, options in AC.items():
            cases[f"tiny-{name}+{mode}"] = {"args": tiny + options + BOTH, "inspect": True}
    for backend, options in COMPILE.items():
        for name in ("llama3", "deepseek_v3") if backend == "aot_eager" else ("llama3",):
            tiny = ["--model.name", name, "--model.flavor", "tiny", *options]
            cases[f"tiny-{name}+{backend}"] = {"args": tiny + BOTH}
            if backend == "aot_eager":
                cases[f"tiny-{name}+{backend}+op_sac"] = {"args": tiny + BOTH + AC["selective-op"]}
    (seen,) = run_cases(1, cases, shared_options)
    return seen


def both(results, *names):
    """Results of two runs that ended well."""
    for name in names:
        assert "error" not in results[name], (name, results[name]["error"])
    return [results[name] for name in names]


@pytest.mark.parametrize("name", FLAVORS)
def test_debug_flavor_trains_alike(name, results):
    stock, converted = both(results, name, f"{name}+converted")
    assert len(stock["loss"]) == 3
    assert stock["loss"][0] > 7
    assert len(set(stock["loss"])) == 3
    tolerance = 1e-3 if name == "gpt_oss" else 1e-5
    assert converted["loss"] == pytest.approx(stock["loss"], rel=tolerance)
    assert converted["grad_norm"] == pytest.approx(stock["grad_norm"], rel=10 * tolerance)


@pytest.mark.parametrize("name", FLAVORS)
def test_operator_calls_per_step_follow_from_the_layers(name, results):
    for step in results[f"{name}+converted"]["calls"]:
        assert step == {
            "npu::npu_rms_norm": NORMS[name],
            "npu::npu_rms_norm_backward": NORMS[name],
            "npu::npu_rotary_mul": ROTATIONS[name],
            "npu::npu_rotary_mul_backward": ROTATIONS[name],
        }


@pytest.mark.parametrize("mode", AC)
@pytest.mark.parametrize("name", AC_FAMILIES)
def test_activation_checkpointing_trains_alike(name, mode, results):
    stock, converted = both(results, f"tiny-{name}", f"tiny-{name}+{mode}")
    assert converted["loss"] == pytest.approx(stock["loss"], rel=1e-5)
    assert converted["grad_norm"] == pytest.approx(stock["grad_norm"], rel=1e-4)
    assert converted["derivations"] == [1]


@pytest.mark.parametrize("name", AC_FAMILIES)
def test_recomputed_operator_calls(name, results):
    for mode in AC:
        for step in results[f"tiny-{name}+{mode}"]["calls"]:
            again = step["npu::npu_rotary_mul"] - step["npu::npu_rotary_mul_backward"]
            # two layers with two rotations each: all again, those of one layer, none (kept)
            assert again == {"full": 4, "selective-2": 2, "selective-op": 0}[mode]
            assert step["npu::npu_rms_norm"] > step["npu::npu_rms_norm_backward"]


@pytest.mark.parametrize("name", AC_FAMILIES)
def test_gradient_accumulation_trains_alike(name, results):
    names = (f"tiny-{name}+accumulate", f"tiny-{name}+accumulate+converted")
    stock, converted = both(results, *names)
    assert converted["loss"] == pytest.approx(stock["loss"], rel=1e-5)
    assert converted["grad_norm"] == pytest.approx(stock["grad_norm"], rel=1e-4)


@pytest.mark.parametrize(
    ("name", "backend", "sac"),
    [
        ("llama3", "aot_eager", ""),
        ("llama3", "aot_eager", "+op_sac"),
        ("deepseek_v3", "aot_eager", ""),
        ("deepseek_v3", "aot_eager", "+op_sac"),
        ("llama3", "inductor", ""),
    ],
)
def test_compiled_blocks_train_alike(name, backend, sac, results):
    stock, converted = both(results, f"tiny-{name}", f"tiny-{name}+{backend}{sac}")
    assert converted["loss"] == pytest.approx(stock["loss"], rel=1e-5)
    assert converted["grad_norm"] == pytest.approx(stock["grad_norm"], rel=1e-4)


def test_numbers_on_the_step_line_are_true(results):
    row = results["llama3"]["row"]
    # this process's resident size, not a constant; and a share of this machine's own peak
    assert 0.1 < row["memory/max_reserved(GiB)"] < 24
    assert 0 < row["memory/max_reserved(%)"] < 100
    assert 0 < row["mfu(%)"] < 100
    assert row["throughput(tps)"] > 0
    assert math.isclose(
        row["tflops"] / row["mfu(%)"],
        results["qwen3"]["row"]["tflops"] / results["qwen3"]["row"]["mfu(%)"],
        rel_tol=0.9,
    )
    assert json.dumps(row)
