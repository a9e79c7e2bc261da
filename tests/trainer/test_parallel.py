"""Real trainer runs over gloo: every layout, converted against unconverted, step by step."""

import pytest

from tests.trainer.harness import run_cases

pytestmark = pytest.mark.slow

BOTH = ["--model.converters", "npu_rms_norm,npu_rope"]


def degree(name, value=2):
    return [f"--parallelism.{name}_degree", str(value)]


TP, PP, CP = (degree(f"{n}_parallel") for n in ("tensor", "pipeline", "context"))
FLEX = ["--model.flavor", "tiny_flex", "--training.seq_len", "256"]
OP_SAC = [
    "--activation_checkpoint.mode",
    "selective",
    "--activation_checkpoint.selective_ac_option",
    "op",
]
NO_BALANCER = ["--parallelism.context_parallel_load_balancer", "None"]

# what torchtitan 0.2.2 can do on two CPU ranks; what it cannot is listed in docs/parallelism.md
LAYOUTS = {
    "llama3-fsdp2": ("llama3", []),
    "llama4-fsdp2": ("llama4", []),
    "qwen3-fsdp2": ("qwen3", []),
    "qwen3_moe-fsdp2": ("qwen3", ["--model.flavor", "tiny_moe"]),
    "deepseek_v3-fsdp2": ("deepseek_v3", []),
    "gpt_oss-fsdp2": ("gpt_oss", []),
    "llama3-fsdp2-op_sac": ("llama3", OP_SAC),
    "qwen3-fsdp2-op_sac": ("qwen3", OP_SAC),
    "llama3-ddp2": ("llama3", degree("data_parallel_replicate") + degree("data_parallel_shard", 1)),
    "llama3-tp2": ("llama3", TP),
    "llama4-tp2": ("llama4", TP),
    "qwen3-tp2": ("qwen3", TP),
    "qwen3_moe-tp2": ("qwen3", [*TP, "--model.flavor", "tiny_moe"]),
    "deepseek_v3-tp2": ("deepseek_v3", TP),
    "deepseek_v3_q_lora-tp2": ("deepseek_v3", [*TP, "--model.flavor", "tiny_q_lora"]),
    "llama3-tp2-op_sac": ("llama3", TP + OP_SAC),
    "llama3-pp2": ("llama3", PP),
    "llama4-pp2": ("llama4", PP),
    "deepseek_v3-pp2": ("deepseek_v3", PP),
    "deepseek_v3-pp2-op_sac": ("deepseek_v3", PP + OP_SAC),
    "llama3-cp2": ("llama3", FLEX + CP),
    "llama3-cp2-unbalanced": ("llama3", FLEX + CP + NO_BALANCER),
}
BF16 = ["--training.mixed_precision_param", "bfloat16"]
# bfloat16 computation on float32 weights, and bfloat16 weights
LOW_PRECISION = {
    "llama3-fsdp2": [],
    "qwen3-fsdp2": [],
    "deepseek_v3-fsdp2": [],
    "llama3-fsdp2-dtype": ["--training.dtype", "bfloat16"],
}


@pytest.fixture(scope="module")
def results(shared_options):
    cases = {}
    for name, (model, options) in LAYOUTS.items():
        args = ["--model.name", model, "--model.flavor", "tiny", *options]
        cases[name] = {"args": args}
        # the host compiles the masks of context parallelism, which no dispatch mode survives
        cases[f"{name}+converted"] = {"args": args + BOTH, "inspect": "-cp2" not in name}
    for name, options in LOW_PRECISION.items():
        for suffix in ("", "+converted"):
            layout = name.removesuffix("-dtype")
            args = cases[f"{layout}{suffix}"]["args"]
            cases[f"{name}-bf16{suffix}"] = {"args": args + BF16 + options}
    return run_cases(2, cases, shared_options)


def loss_rank(name):
    return 1 if "-pp2" in name else 0


@pytest.mark.parametrize("name", LAYOUTS)
def test_layout_equals_the_unconverted_run(name, results):
    for rank, seen in enumerate(results):
        stock, converted = seen[name], seen[f"{name}+converted"]
        assert "error" not in stock, stock
        assert "error" not in converted, converted
        if rank == loss_rank(name):
            assert stock["loss"][0] > 7
            assert len(stock["loss"]) == 3
            assert stock["loss"] != stock["loss"][:1] * 3
        assert converted["loss"] == pytest.approx(stock["loss"], rel=1e-5)
        assert converted["grad_norm"] == pytest.approx(stock["grad_norm"], rel=1e-4)


@pytest.mark.parametrize("name", [n for n in LAYOUTS if "-cp2" not in n])
def test_fused_operators_run_in_every_layout(name, results):
    calls = [r[f"{name}+converted"]["calls"] for r in results]
    for rank in calls:
        # with pipeline stages, the first step also runs a forward to learn shapes
        for step in rank[1:]:
            assert step["npu::npu_rms_norm"] > 0
            # every forward call has its backward, and only recomputation adds forwards
            norms, back = step["npu::npu_rms_norm"], step["npu::npu_rms_norm_backward"]
            assert norms >= back > 0
            if "op_sac" in name:
                # rotated outputs are kept by the save list, norms are recomputed
                assert step["npu::npu_rotary_mul"] == step["npu::npu_rotary_mul_backward"]
                assert norms > back
            else:
                assert norms == back
                assert step["npu::npu_rotary_mul"] == step["npu::npu_rotary_mul_backward"] > 0


@pytest.mark.parametrize("name", LAYOUTS)
def test_tables_are_derived_once_per_model_part(name, results):
    for seen in results:
        assert seen[f"{name}+converted"]["derivations"] == [1]


@pytest.mark.parametrize("name", LOW_PRECISION)
def test_bfloat16_is_as_near_to_float32_as_the_unconverted_run(name, results):
    seen = results[0]
    truth = seen[name.removesuffix("-dtype")]

    def distance(run):
        parts = [
            abs(a - b) / b
            for key in ("loss", "grad_norm")
            for a, b in zip(run[key], truth[key], strict=True)
        ]
        return sum(parts) / len(parts)

    stock, converted = distance(seen[f"{name}-bf16"]), distance(seen[f"{name}-bf16+converted"])
    assert 0 < converted <= 2 * stock
