"""Converted models against unconverted ones: every family, subset, order; nothing else changes."""

import copy
import itertools
import re

import pytest
import torch

from tests.op_norm_rope import models
from torchtitan_npu_core.apply import convert_model
from torchtitan_npu_core.probe import OperatorProbe

# torch_npu copies through torch's old storages
pytestmark = pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")

BOTH = ["npu_rms_norm", "npu_rope"]
SUBSETS = [["npu_rms_norm"], ["npu_rope"], BOTH]


def converted(family, names, plugins, **kwargs):
    model = models.build(family, **kwargs)
    convert_model(model, names, plugins=plugins)
    return model


@pytest.mark.parametrize("names", SUBSETS, ids=lambda n: "+".join(n))
@pytest.mark.parametrize("family", models.FAMILIES)
def test_loss_output_and_every_gradient_equal_the_unconverted_model(family, names, plugins):
    stock, model = models.build(family), converted(family, names, plugins)
    models.assert_alike(models.run(model, family), models.run(stock, family), 1e-5)


@pytest.mark.parametrize("family", models.FAMILIES)
def test_bfloat16_error_is_at_most_twice_that_of_the_unconverted_model(family, plugins):
    truth = models.build(family)
    stock = copy.deepcopy(truth).bfloat16()
    model = copy.deepcopy(stock)
    convert_model(model, BOTH, plugins=plugins)
    for m in (stock, model):
        # .bfloat16() rounds real tables; the trainer keeps them in float32 outside FSDP
        for name in ("freqs_cis", "rope_cache"):
            if name in truth._buffers:
                m._buffers[name] = truth._buffers[name].clone()
    errors = []
    want = models.run(truth, family)
    for m in (stock, model):
        got = models.run(m, family)
        norms = [(got[1].float() - want[1]).norm() / want[1].norm()]
        for name, grad in want[2].items():
            # experts see other tokens once a routing decision flips; compare the dense part
            if grad is not None and ".moe." not in name:
                norms.append((got[2][name].float() - grad).norm() / grad.norm().clamp_min(1e-9))
        errors.append(torch.stack(norms).mean().item())
    assert errors[1] <= 2 * errors[0]


@pytest.mark.parametrize("family", ["llama3", "qwen3", "deepseek_v3"])
def test_every_order_gives_the_same_model(family, plugins):
    results = []
    for names in itertools.permutations(BOTH):
        model = converted(family, list(names), plugins)
        results.append((models.run(model, family), [type(m) for m in model.modules()]))
    assert results[0][1] == results[1][1]
    models.assert_alike(results[0][0], results[1][0], 0.0)


@pytest.mark.parametrize("family", models.FAMILIES)
def test_counts_and_operator_calls_follow_from_the_layers(family, plugins):
    model = models.build(family)
    result = convert_model(model, BOTH, plugins=plugins)
    norms, attentions = models.NORMS[family], models.ATTENTIONS[family]
    rotations = models.ROTATIONS_PER_ATTENTION * attentions
    assert len(result.replaced["npu_rms_norm"]) == norms
    assert len(result.replaced["npu_rope"]) == attentions
    with OperatorProbe() as probe:
        models.run(model, family)
    # torch_npu computes more than these with operators of its own
    counted = {name: n for name, n in probe.counts.items() if re.search("rms_norm|rotary", name)}
    assert counted == {
        "npu::npu_rms_norm": norms,
        "npu::npu_rms_norm_backward": norms,
        "npu::npu_rotary_mul": rotations,
        "npu::npu_rotary_mul_backward": rotations,
    }
    assert result.calls_per_forward == {
        "npu::npu_rms_norm": norms,
        "npu::npu_rotary_mul": rotations,
    }


@pytest.mark.parametrize("family", ["llama3", "deepseek_v3"])
def test_model_that_already_has_weights_keeps_them(family, plugins):
    model = models.build(family)
    with torch.no_grad():
        for i, p in enumerate(model.parameters()):
            p.add_(0.001 * i)
    before = models.run(model, family)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    values = {k: v.clone() for k, v in model.state_dict().items()}
    identity = {n: (id(p), p.data_ptr()) for n, p in model.named_parameters()}
    convert_model(model, BOTH, plugins=plugins)
    assert {n: (id(p), p.data_ptr()) for n, p in model.named_parameters()} == identity
    state = model.state_dict()
    assert list(state) == list(values)
    for key, value in values.items():
        assert torch.equal(state[key], value), key
        assert state[key].dtype == value.dtype
    models.assert_alike(models.run(model, family), before, 1e-5)
    optimizer.step()
    assert not torch.equal(model.norm.weight, values["norm.weight"])


@pytest.mark.parametrize("family", models.FAMILIES)
def test_initialisation_draws_the_same_numbers(family, plugins):
    stock = models.build(family, seed=3)
    model = models.build(family, device="meta")
    convert_model(model, BOTH, plugins=plugins)
    models.materialise(model, seed=3)
    for (n, a), (m, b) in zip(stock.state_dict().items(), model.state_dict().items(), strict=True):
        assert n == m
        assert torch.equal(a, b), n


def test_second_model_of_the_same_classes_stays_stock(plugins):
    other = models.build("deepseek_v3")
    before = models.run(other, "deepseek_v3")
    converted("deepseek_v3", BOTH, plugins)
    models.assert_alike(models.run(other, "deepseek_v3"), before, 0.0)
    later = models.build("deepseek_v3")
    assert not [c for m in later.modules() for c in type(m).__mro__ if "Fused" in c.__name__]
    models.assert_alike(models.run(later, "deepseek_v3"), before, 0.0)


def test_deepcopy_is_independent_of_the_original(plugins):
    model = converted("llama3", BOTH, plugins)
    models.run(model, "llama3")
    other = copy.deepcopy(model)
    want = models.run(other, "llama3")
    with torch.no_grad():
        model.freqs_cis.mul_(0)  # only the original's table
    models.assert_alike(models.run(other, "llama3"), want, 0.0)
    assert models.relative(models.run(model, "llama3")[1], want[1]) > 1e-4


def test_model_under_another_name_converts(plugins):
    spec, args = models.model_args("llama3")

    class Sponge(spec.model_cls):
        pass

    model = Sponge(args)
    with torch.no_grad():
        model.init_weights(torch.device("cpu"))
    result = convert_model(model, BOTH, plugins=plugins)
    assert result.num_replaced == 7


def test_host_modules_are_the_same_before_and_after(plugins):
    import torchtitan.distributed.activation_checkpoint
    import torchtitan.models.attention
    import torchtitan.models.deepseek_v3.model.model as deepseek
    import torchtitan.models.llama3.model.model as llama
    import torchtitan.models.moe.moe as moe
    import torchtitan.models.qwen3.model.model as qwen
    import torchtitan.protocols.model_converter as converters
    import torchtitan.protocols.train_spec as specs

    watched = [
        deepseek,
        llama,
        qwen,
        moe,
        torchtitan.models.attention,
        converters,
        specs,
        torchtitan.distributed.activation_checkpoint,
        torch,
        torch.nn,
        torch.nn.functional,
        torch.utils.checkpoint,
        *(c for m in (deepseek, llama, qwen, moe) for c in vars(m).values() if isinstance(c, type)),
        torch.nn.RMSNorm,
        torch.nn.Module,
    ]

    def snapshot():
        return [
            {k: id(v) for k, v in vars(w).items() if k != "__warningregistry__"} for w in watched
        ]

    before = snapshot()
    for family in ("llama3", "qwen3", "deepseek_v3"):
        models.run(converted(family, BOTH, plugins), family)
        model = converted(family, BOTH, plugins)
        model.layers["0"].register_forward_pre_hook(lambda *a: {}["stop"])
        with pytest.raises(KeyError):
            models.run(model, family)
        after = snapshot()
        for what, a, b in zip(watched, before, after, strict=True):
            assert a == b, what
