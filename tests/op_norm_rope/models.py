"""Small models of every text family the host has, in float32 with weights."""

import copy

import torch

from tests.tiny import FLAVORS, SMALL, host_name, shrink
from torchtitan_npu_core.cpu_model import prepare_for_cpu

SEQ_LEN = 16
FAMILIES = tuple(SMALL)
VOCAB = 96

NORMS = {
    "llama3": 5,
    "llama4": 5,
    "qwen3": 9,
    "qwen3_moe": 9,
    "deepseek_v3": 7,
    "deepseek_v3_q_lora": 5,
    "gpt_oss": 5,
}
ATTENTIONS = {name: sizes["n_layers"] for name, sizes in SMALL.items()}
ROTATIONS_PER_ATTENTION = 2


def model_args(family):
    from torchtitan.protocols.train_spec import get_train_spec

    spec = get_train_spec(host_name(family))
    args = copy.deepcopy(spec.model_args[FLAVORS.get(family, "debugmodel")])
    shrink(args, family)
    args.vocab_size, args.max_seq_len = VOCAB, SEQ_LEN
    args.moe_impl = "standard"
    return spec, args


def build(family, seed=0, device=None):
    """A model as the host builds it, prepared for CPU, initialised from a seed."""
    spec, args = model_args(family)
    with torch.device("meta"):
        model = spec.model_cls(args)
    prepare_for_cpu(model)
    return model if device == "meta" else materialise(model, seed)


def materialise(model, seed=0):
    model.to_empty(device="cpu")
    torch.manual_seed(seed)
    with torch.no_grad():
        model.init_weights(buffer_device=torch.device("cpu"))
    # the same numbers on every device, so drawn on the CPU; gpt_oss builds its blocks in bfloat16
    # whatever the training dtype
    return model.float().to(torch.get_default_device())


def call_kwargs(model, family, tokens):
    """The masks a model wants, as the trainer makes them."""
    if family != "gpt_oss":
        return {}

    class Tokenizer:
        eos_id = 1

    return {"attention_masks": model.get_attention_masks(tokens, Tokenizer())}


def tokens_for(seed=0, batch=2, length=SEQ_LEN):
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(2, VOCAB, (batch, length), generator=generator, device="cpu")
    return tokens.to(torch.get_default_device())


def run(model, family, tokens=None, **kwargs):
    """Loss, output and every gradient of one forward and backward."""
    tokens = tokens_for() if tokens is None else tokens
    model.zero_grad(set_to_none=True)
    out = model(tokens, **call_kwargs(model, family, tokens), **kwargs)
    loss = torch.nn.functional.cross_entropy(
        out.float().flatten(0, 1), tokens.roll(-1, 1).flatten()
    )
    loss.backward()
    grads = {n: p.grad for n, p in model.named_parameters()}
    return loss.detach(), out.detach(), grads


def relative(a, b):
    """Largest difference, relative to the largest value."""
    return ((a - b).abs().max() / b.abs().max().clamp_min(1e-12)).item()


def assert_alike(got, want, tolerance):
    assert relative(got[0], want[0]) <= tolerance
    assert relative(got[1], want[1]) <= tolerance
    for name, grad in want[2].items():
        other = got[2][name]
        assert (grad is None) == (other is None), name
        if grad is not None:
            assert grad.dtype == other.dtype, name
            assert relative(other, grad) <= tolerance, (name, relative(other, grad))
