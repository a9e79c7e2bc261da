import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.flex_attention import create_block_mask

from torchtitan_npu_core.cpu_model import flex_reference, histc, prepare_for_cpu
from torchtitan_npu_core.errors import CommandError


def test_histc_counts_like_the_float_kernel():
    x = torch.tensor([0, 3, 3, 1, 7, 0, 3])
    want = torch.histc(x.float(), bins=8, min=0, max=8)
    got = histc(x, bins=8, min=0, max=8)
    assert got.dtype == torch.int64
    assert torch.equal(got.float(), want)
    assert torch.equal(histc(x[:0], bins=4), torch.zeros(4, dtype=torch.int64))


@pytest.mark.parametrize("gqa", [False, True])
def test_flex_reference_equals_sdpa_under_the_same_mask(gqa):
    torch.manual_seed(0)
    q = torch.randn(2, 4, 9, 8, dtype=torch.float64, requires_grad=True)
    k, v = (
        torch.randn(2, 2 if gqa else 4, 9, n, dtype=torch.float64, requires_grad=True)
        for n in (8, 6)
    )
    document = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 2, 2], [0] * 9])

    def mask_mod(b, h, q_idx, kv_idx):
        return (q_idx >= kv_idx) & (document[b, q_idx] == document[b, kv_idx])

    mask = create_block_mask(mask_mod, 2, None, 9, 9, device="cpu")
    out, lse = flex_reference(q, k, v, block_mask=mask, scale=0.3, return_lse=True, enable_gqa=gqa)
    dense = torch.ones(9, 9, dtype=torch.bool).tril() & (
        document[:, :, None] == document[:, None, :]
    )
    want = F.scaled_dot_product_attention(
        q, k, v, attn_mask=dense[:, None], scale=0.3, enable_gqa=gqa
    )
    torch.testing.assert_close(out, want, rtol=1e-5, atol=1e-6)
    weight = torch.randn_like(out)
    grads = torch.autograd.grad((out * weight).sum(), (q, k, v), retain_graph=True)
    wanted = torch.autograd.grad((want * weight).sum(), (q, k, v))
    for a, b in zip(grads, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
    keys = k.repeat_interleave(2, 1) if gqa else k
    scores = (q @ keys.transpose(-2, -1) * 0.3).masked_fill(~dense[:, None], float("-inf"))
    torch.testing.assert_close(lse.double(), scores.logsumexp(-1), rtol=1e-5, atol=1e-5)


def test_row_that_sees_nothing_is_zero():
    mask = create_block_mask(lambda b, h, q, k: (q > 0) & (k < 2), 1, None, 4, 4, device="cpu")
    q = torch.randn(1, 1, 4, 8, requires_grad=True)
    out = flex_reference(q, q, q, block_mask=mask)
    out.sum().backward()
    assert torch.equal(out[0, 0, 0], torch.zeros(8))
    assert torch.isfinite(q.grad).all()


def gpt_oss():
    from torchtitan.protocols.train_spec import get_train_spec

    spec = get_train_spec("gpt_oss")
    args = copy.deepcopy(spec.model_args["debugmodel"])
    args.n_layers, args.vocab_size, args.dim, args.max_seq_len = 1, 64, 64, 32
    args.moe_inter_dim = 32
    return spec.model_cls(args)


def test_gate_bias_is_initialised():
    model = gpt_oss()
    router = model.layers["0"].moe.router
    prepare_for_cpu(model)
    with torch.no_grad():
        router.gate.bias.fill_(float("nan"))
        model.init_weights(torch.device("cpu"))
    assert torch.equal(router.gate.bias, torch.zeros_like(router.gate.bias))


def test_preparing_twice_changes_nothing_and_other_models_stay():
    model, other = gpt_oss(), gpt_oss()
    before = {n: type(m) for n, m in other.named_modules()}
    assert prepare_for_cpu(model)
    classes = {n: type(m) for n, m in model.named_modules()}
    assert prepare_for_cpu(model) == {}
    assert {n: type(m) for n, m in model.named_modules()} == classes
    assert {n: type(m) for n, m in other.named_modules()} == before


def test_variable_length_attention_is_refused_by_name():
    from torchtitan.models.attention import VarlenAttentionWrapper

    with pytest.raises(CommandError, match="inner uses variable-length attention"):
        prepare_for_cpu(nn.ModuleDict({"inner": VarlenAttentionWrapper()}))
