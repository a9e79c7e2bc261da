"""Norm and rotary operators, and a training step, converted against unconverted, in one run.

    python benchmarks/norm_rope.py [--json]

Prints forward + backward times in milliseconds (medians) and their ratio; below 1 the converted one
is faster. Times are for reading: nothing passes or fails by them.
"""

import copy
import itertools
import json
import statistics
import sys
import time

import torch
import torch.nn.functional as F

from torchtitan_npu_core.apply import convert_model
from torchtitan_npu_core.loading import discover_and_load
from torchtitan_npu_core.operators import register_plugin_operators

SHAPE = (4, 2048, 2048)
HEAD_DIM = 128


def compare(ours, stock, repeats=9):
    """Median times of both, ms, and the median ratio of runs side by side.

    The two alternate: what else the machine does, and the state of its memory, then meets both.
    """

    def once(function):
        start = time.perf_counter()
        function()
        return (time.perf_counter() - start) * 1e3

    once(ours), once(stock)
    pairs = [(once(ours), once(stock)) for _ in range(repeats)]
    a, b = (statistics.median(side) for side in zip(*pairs, strict=True))
    return a, b, statistics.median(x / y for x, y in pairs)


def backward_of(function, *inputs):
    """A function that runs forward and backward."""
    grad = torch.randn_like(function(*inputs))

    def run():
        # gradients as a layer below would get them, without accumulation into leaves
        torch.autograd.grad(function(*inputs), inputs, grad)

    return run


def operators(dtype):
    """(name, converted, unconverted) for one dtype."""
    from torchtitan.models.deepseek_v3.model.model import apply_rotary_emb as interleaved
    from torchtitan.models.qwen3.model.model import apply_rotary_emb as half
    from torchtitan.models.qwen3.model.model import precompute_rope_cache

    npu = torch.ops.npu
    x = torch.randn(SHAPE, dtype=dtype, requires_grad=True)
    gamma = torch.ones(SHAPE[-1], dtype=dtype, requires_grad=True)
    yield (
        "rms_norm",
        backward_of(lambda x, g: npu.npu_rms_norm(x, g, 1e-6)[0], x, gamma),
        backward_of(lambda x, g: F.rms_norm(x, SHAPE[-1:], g, 1e-6), x, gamma),
    )
    heads = torch.randn(*SHAPE[:2], SHAPE[2] // HEAD_DIM, HEAD_DIM, dtype=dtype, requires_grad=True)
    angle = torch.randn(SHAPE[1], HEAD_DIM // 2)
    wide = angle.repeat_interleave(2, -1)[None, :, None]
    cos, sin = wide.cos(), wide.sin()
    freqs = torch.polar(torch.ones_like(angle), angle)
    yield (
        "rotary interleave",
        backward_of(
            lambda x: npu.npu_rotary_mul(x.float(), cos, sin, "interleave").to(x.dtype), heads
        ),
        backward_of(lambda x: interleaved(x, freqs), heads),
    )
    cache = precompute_rope_cache(HEAD_DIM, SHAPE[1])
    cos, sin = (t[None, :, None].to(dtype).contiguous() for t in cache.split(HEAD_DIM, -1))
    # the host's function always rotates a key too; give it one that costs next to nothing
    key = torch.zeros(1, SHAPE[1], 1, HEAD_DIM, dtype=dtype)
    yield (
        "rotary half",
        backward_of(lambda x: npu.npu_rotary_mul(x, cos, sin, "half"), heads),
        backward_of(lambda x: half(x, key, cache)[0], heads),
    )


def steps():
    """(name, converted, unconverted) training steps of debug models, bfloat16 weights."""
    from torchtitan.protocols.train_spec import get_train_spec

    from torchtitan_npu_core.cpu_model import prepare_for_cpu

    for name in ("llama3", "deepseek_v3"):
        spec = get_train_spec(name)
        args = copy.deepcopy(spec.model_args["debugmodel"])
        args.max_seq_len, args.moe_impl = 512, "standard"
        model = spec.model_cls(args)
        prepare_for_cpu(model)
        with torch.no_grad():
            model.init_weights(torch.device("cpu"))
        other = copy.deepcopy(model)
        convert_model(other, ["npu_rms_norm", "npu_rope"])
        tokens = torch.randint(0, args.vocab_size, (4, 512))

        def step(model, tokens=tokens):
            def run():
                model.zero_grad()
                logits = model(tokens)
                F.cross_entropy(logits.flatten(0, 1), tokens.flatten()).backward()

            return run

        yield f"{name} debugmodel step", step(other), step(model)


def main():
    """Measure and print."""
    torch.manual_seed(0)
    plugins = discover_and_load()
    for record in plugins.loaded:
        register_plugin_operators(plugins, record)
    cases = (
        (f"{name} {str(dtype).removeprefix('torch.')}", ours, stock)
        for dtype in (torch.float32, torch.bfloat16)
        for name, ours, stock in operators(dtype)
    )
    rows = []
    for name, ours, stock in itertools.chain(cases, steps()):
        a, b, ratio = compare(ours, stock)
        rows.append({"case": name, "converted_ms": a, "unconverted_ms": b, "ratio": ratio})
        if "--json" not in sys.argv:
            print(f"{name:32} {a:9.1f} ms {b:9.1f} ms  ratio {ratio:.2f}", flush=True)
    if "--json" in sys.argv:
        print(json.dumps({"shape": SHAPE, "threads": torch.get_num_threads(), "rows": rows}))


if __name__ == "__main__":
    main()
