"""Rotary tables: derived once, shared, fresh when they must be; positions, recompute, compile."""

import gc
import importlib.util
import pathlib
import sys

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.op_norm_rope import models
from torchtitan_npu_core.apply import convert_model
from torchtitan_npu_core.errors import UnmatchedConverterError
from torchtitan_npu_core.probe import OperatorProbe
from torchtitan_npu_op_norm_rope.contract import RotaryContract, rotary_contract
from torchtitan_npu_op_norm_rope.tables import TABLES_ATTRIBUTE, RotaryTables, derive

FAMILIES = ["llama3", "qwen3", "deepseek_v3"]


def converted(family, plugins, **options):
    model = models.build(family)
    section = {"npu_rope": options} if options else None
    convert_model(model, ["npu_rope"], plugins=plugins, section=section)
    return model, getattr(model, TABLES_ATTRIBUTE)


def cache_name(model):
    return "freqs_cis" if hasattr(model, "freqs_cis") else "rope_cache"


def set_table(model, value):
    """Replace the table as init_weights does."""
    setattr(model, cache_name(model), value)


@pytest.mark.parametrize("family", FAMILIES)
def test_tables_are_derived_once_for_many_steps_and_shared(family, plugins):
    model, tables = converted(family, plugins)
    for _ in range(3):
        models.run(model, family)
    assert tables.num_derivations == 1
    assert all(
        getattr(layer.attention, TABLES_ATTRIBUTE) is tables for layer in model.layers.values()
    )


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("how", ["new tensor", "in place", "init_weights", "longer"])
def test_tables_follow_the_buffer(family, how, plugins):
    (model, tables), stock = converted(family, plugins), models.build(family)
    models.run(model, family)
    for m in (model, stock):
        table = getattr(m, cache_name(m))
        if how == "new tensor":
            set_table(m, table.flip(0).contiguous())
        elif how == "in place":
            table.mul_(-1)
        elif how == "init_weights":
            models.materialise(m, seed=7)
        else:
            set_table(m, torch.cat((table.flip(0), table)))
    models.assert_alike(models.run(model, family), models.run(stock, family), 1e-5)
    assert tables.num_derivations == 2


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "positions",
    [
        torch.arange(models.SEQ_LEN).flip(0)[None],
        torch.stack((torch.arange(16) % 5, torch.arange(16) % 11)),
    ],
    ids=["shared-out-of-order", "per-row-resets"],
)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_positions_equal_stock_never_row_0_for_all(family, positions, dtype, plugins):
    (model, tables), stock = converted(family, plugins), models.build(family)
    positions = positions.to(torch.get_default_device(), dtype)
    # per row, the unconverted model gathers, which takes int64 only
    want = models.run(stock, family, positions=positions.long())
    models.assert_alike(models.run(model, family, positions=positions), want, 1e-5)
    assert tables.num_derivations == 1
    if positions.shape[0] > 1:
        row_0 = positions[:1].expand_as(positions).contiguous()
        other = models.run(model, family, positions=row_0)
        assert models.relative(other[1], want[1]) > 1e-5


@pytest.mark.parametrize("family", FAMILIES)
def test_two_micro_batches_with_other_positions_may_interleave(family, plugins):
    (model, _), stock = converted(family, plugins), models.build(family)
    first = torch.stack((torch.arange(16) % 5, torch.arange(16) % 11))
    second = torch.stack((torch.arange(16) % 3, torch.arange(16)))
    results = []
    for m in (model, stock):
        for name, layer in m.layers.items():
            m.layers[name] = Checkpointed(layer)
        outs = [m(models.tokens_for(i), positions=p) for i, p in enumerate((first, second))]
        # backward in the order of forward: the first recomputes after the second's forward
        for out in outs:
            out.square().mean().backward()
        results.append({n: p.grad for n, p in m.named_parameters()})
    for name, grad in results[1].items():
        assert models.relative(results[0][name], grad) <= 1e-5, name


class Checkpointed(nn.Module):
    def __init__(self, block):
        super().__init__()
        self.block = block

    def forward(self, *args, **kwargs):
        return checkpoint(self.block, *args, use_reentrant=False, **kwargs)


@pytest.mark.parametrize("family", FAMILIES)
def test_layer_called_without_its_root_uses_its_own_arguments(family, plugins):
    (model, _), stock = converted(family, plugins), models.build(family)
    models.run(model, family)
    attention, plain = (m.layers["0"].attention for m in (model, stock))
    other = getattr(model, cache_name(model)).flip(0).contiguous()
    x = torch.randn(2, models.SEQ_LEN, 64)
    torch.testing.assert_close(attention(x, other, None), plain(x, other, None))
    positions = torch.stack((torch.arange(16) % 5, torch.arange(16) % 11))
    torch.testing.assert_close(
        attention(x, other, None, positions), plain(x, other, None, positions)
    )
    # a slice of the model's own table is not the table
    part = getattr(model, cache_name(model))[3:]
    short = x[:, :9]
    torch.testing.assert_close(attention(short, part, None), plain(short, part, None))


def test_another_table_of_another_dtype_is_not_mistaken_outside_the_root(plugins):
    (model, _), stock = converted("qwen3", plugins), models.build("qwen3")
    models.run(model, "qwen3")
    attention, plain = (m.layers["0"].attention for m in (model, stock))
    other = model.rope_cache.flip(0).bfloat16()
    x = torch.randn(2, models.SEQ_LEN, 64)
    torch.testing.assert_close(attention(x, other, None), plain(x, other, None))


def test_copy_that_the_host_cast_gives_stock_numbers_and_no_new_derivation(plugins):
    # FSDP hands every block its own bfloat16 copy of a real table
    (model, tables), stock = converted("qwen3", plugins), models.build("qwen3")

    class Casting(nn.Module):
        def __init__(self, block):
            super().__init__()
            self.block = block

        def forward(self, x, cache, *rest):
            return checkpoint(
                self.block, x.bfloat16(), cache.bfloat16(), *rest, use_reentrant=False
            )

    for m in (model, stock):
        m.bfloat16()
        m.rope_cache = models.build("qwen3").rope_cache
        for name, layer in m.layers.items():
            m.layers[name] = Casting(layer)
    truth = models.run(models.build("qwen3"), "qwen3")[1]
    errors = [(models.run(m, "qwen3")[1].float() - truth).norm() for m in (model, stock)]
    assert errors[0] <= 1.5 * errors[1]
    assert tables.num_derivations == 1


def test_exception_in_forward_leaves_no_open_scope(plugins):
    model, tables = converted("llama3", plugins)
    handle = model.norm.register_forward_pre_hook(lambda *a: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(models.tokens_for())
    assert tables._current is None
    handle.remove()
    models.run(model, "llama3")


def test_gathered_tables_die_with_their_positions(plugins):
    model, tables = converted("llama3", plugins)
    for i in range(3):
        positions = torch.stack((torch.arange(16) % (3 + i), torch.arange(16) % 11))
        models.run(model, "llama3", positions=positions)
    del positions
    gc.collect()
    (derived,) = tables._derived.values()
    assert len(derived.gathered) == 0


def test_table_computed_from_the_models_own_is_not_taken_for_a_copy(plugins):
    class Root(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = Mine()
            angle = torch.outer(torch.arange(9.0), torch.tensor([1.0, 0.1, 0.01, 0.001]))
            wide = torch.cat((angle, angle), -1)
            self.register_buffer("rope_cache", torch.cat((wide.cos(), wide.sin()), -1))

        def forward(self, x):
            return self.layer(x, (self.rope_cache * 0.5).to(x.dtype))

    stock, model = Root(), Root()
    convert_model(model, ["npu_rope"], plugins=plugins)
    x = torch.randn(2, 5, 3, 8).bfloat16()
    torch.testing.assert_close(model(x), stock(x), rtol=2e-2, atol=2e-2)


# torch says so when autocast gives its norm a half input and a float32 weight
@pytest.mark.filterwarnings("ignore:Mismatch dtype")
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("with_positions", [False, True])
def test_forward_in_inference_mode_does_not_spoil_training(family, with_positions, plugins, device):
    (model, _), stock = converted(family, plugins), models.build(family)
    positions = torch.stack((torch.arange(16) % 5, torch.arange(16) % 11))
    kwargs = {"positions": positions} if with_positions else {}
    for dtype in (torch.float32, torch.bfloat16):
        autocast = torch.autocast(device, dtype, enabled=dtype != torch.float32)
        with torch.inference_mode(), autocast:
            model(models.tokens_for(), **kwargs)
    models.assert_alike(
        models.run(model, family, **kwargs), models.run(stock, family, **kwargs), 1e-5
    )


@pytest.mark.parametrize("write", ["inference", "data", "numpy", "in place"])
def test_positions_written_between_forwards_are_read_again(write, plugins, device):
    if write == "numpy" and device != "cpu":
        pytest.skip("numpy shares memory with the CPU only")
    (model, _), stock = converted("qwen3", plugins), models.build("qwen3")
    tokens = models.tokens_for()
    outs = []
    for m in (model, stock):
        with torch.inference_mode(write == "inference"):
            array = torch.zeros(2, 16, dtype=torch.int64, device="cpu").numpy().copy()
            positions = torch.from_numpy(array) if write == "numpy" else torch.tensor(array)
            m(tokens, positions=positions)
            new = torch.arange(16).expand(2, -1)
            if write == "numpy":
                array[:] = new.numpy()
            else:
                (positions.data if write == "data" else positions).copy_(new)
            outs.append(m(tokens, positions=positions))
    torch.testing.assert_close(outs[0], outs[1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_negative_positions_are_refused_as_by_stock(family, plugins):
    model, _ = converted(family, plugins)
    positions = torch.arange(16).expand(2, -1).clone()
    positions[0, 3] = -1
    with pytest.raises((IndexError, RuntimeError), match="out of"):
        models.run(model, family, positions=positions)


def test_option_rotates_half_split_models_in_float32(plugins):
    model, _ = converted("qwen3", plugins, fp32=True)
    seen = []

    def look(module, args, kwargs):
        seen.append(module.rotary_wide)

    model.layers["0"].attention.register_forward_pre_hook(look, with_kwargs=True)
    models.run(model.bfloat16(), "qwen3")
    assert seen == [True]


def test_no_complex_tensor_is_indexed():
    from torch.utils._python_dispatch import TorchDispatchMode

    class NoComplexIndex(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            name = func._schema.name
            if name in ("aten::index", "aten::slice", "aten::gather", "aten::index_select"):
                assert not args[0].is_complex(), name
            return func(*args, **(kwargs or {}))

    tables = RotaryTables()
    cache = torch.polar(torch.ones(8, 4), torch.randn(8, 4))
    with NoComplexIndex():
        for positions in (None, torch.arange(6)[None], torch.arange(12).view(2, 6) % 8):
            cos, sin = tables.lookup(cache, positions, 6, torch.float32, Mine())
            assert cos.shape[1:] == (6, 1, 8)
    torch.testing.assert_close(cos**2 + sin**2, torch.ones_like(cos))


def test_derive_complex_and_real():
    angle = torch.randn(5, 3)
    cos, sin = derive(torch.polar(torch.ones_like(angle), angle))
    torch.testing.assert_close(cos[:, 0::2], angle.cos())
    torch.testing.assert_close(sin[:, 1::2], angle.sin())
    wide = torch.cat((angle, angle), -1)
    cos, sin = derive(torch.cat((wide.cos(), wide.sin()), -1))
    assert torch.equal(cos, wide.cos())
    assert torch.equal(sin, wide.sin())


# ---------------------------------------------------------------- recognising


EXPECTED = {
    "llama3": ("interleave", 2, True, True),
    "llama4": ("interleave", 2, True, True),
    "deepseek_v3": ("interleave", 1, True, True),
    "qwen3": ("half", 2, False, False),
    "gpt_oss": ("half", 2, False, False),
}


@pytest.mark.parametrize("family", EXPECTED)
def test_convention_of_every_family(family):
    attention = type(models.build(family, device="meta").layers["0"].attention)
    found = rotary_contract(attention)
    assert isinstance(found, RotaryContract)
    assert (found.mode, found.num_tensors, found.complex_cache, found.wide) == EXPECTED[family]


def test_recognising_does_not_depend_on_the_default_device():
    attention = type(models.build("qwen3", device="meta").layers["0"].attention)
    with torch.device("meta"):
        found = rotary_contract.__wrapped__(attention)
    assert found == rotary_contract(attention)


def apply_rotary_wrong_sign(x, cache):
    half = x.shape[-1] // 2
    cos, sin = cache[: x.shape[1], None, : 2 * half], cache[: x.shape[1], None, 2 * half :]
    return x * cos + torch.cat((x[..., half:], -x[..., :half]), -1) * sin


class WrongSign(nn.Module):
    def forward(self, x, cache):
        return apply_rotary_wrong_sign(x, cache)


def apply_rotary_half(x, cache):
    d = x.shape[-1]
    cos, sin = cache[: x.shape[1], None, :d], cache[: x.shape[1], None, d:]
    return x * cos + torch.cat((-x[..., d // 2 :], x[..., : d // 2]), -1) * sin


class UsesTheTableElsewhere(nn.Module):
    def forward(self, x, cache):
        return apply_rotary_half(x, cache) + cache.sum()


class Mine(nn.Module):
    def forward(self, x, cache):
        return apply_rotary_half(x, cache)


@pytest.mark.parametrize(
    ("cls", "says"), [(WrongSign, "neither"), (UsesTheTableElsewhere, "something else")]
)
def test_unknown_mathematics_is_refused_by_name(cls, says, plugins):
    with pytest.raises(UnmatchedConverterError, match=says):
        convert_model(nn.Sequential(cls()), ["npu_rope"], plugins=plugins)


def test_module_of_anybody_converts_by_contract(plugins):
    box = nn.ModuleList([Mine(), Mine()])
    convert_model(box, ["npu_rope"], plugins=plugins)
    x, cache = torch.randn(2, 5, 3, 8), torch.randn(9, 16)
    with OperatorProbe() as probe:
        got = box[0](x, cache)
    assert probe.counts["npu::npu_rotary_mul"] == 1
    torch.testing.assert_close(got, Mine()(x, cache))
    torch.testing.assert_close(box[1](x=x, cache=cache), got)


def test_layers_without_rotary_embedding_are_skipped_and_reported(plugins):
    model = models.build("llama4")
    model.layers["1"].attention.use_rope = False
    result = convert_model(model, ["npu_rope"], plugins=plugins)
    assert result.skipped["npu_rope"] == [
        ("layers.1.attention", "this layer uses no rotary embedding")
    ]
    assert result.replaced["npu_rope"] == ["layers.0.attention"]


def flux_layers():
    """The host's flux layers, without its package, which imports text encoders from elsewhere."""
    import torchtitan

    path = pathlib.Path(torchtitan.__path__[0], "models/flux/model/layers.py")
    spec = importlib.util.spec_from_file_location("flux_layers", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["flux_layers"] = module
    spec.loader.exec_module(module)
    return module


def test_flux_norms_convert_and_its_rotary_is_refused_by_name(plugins):
    layers = flux_layers()
    block = layers.SingleStreamBlock(64, 2)
    stock = layers.SingleStreamBlock(64, 2)
    stock.load_state_dict(block.state_dict())
    box = nn.ModuleList([block])
    with pytest.raises(UnmatchedConverterError, match="apply_rope"):
        convert_model(box, ["npu_rope"], plugins=plugins)
    result = convert_model(box, ["npu_rms_norm"], plugins=plugins)
    assert len(result.replaced["npu_rms_norm"]) == 2
    x, vec = torch.randn(1, 6, 64), torch.randn(1, 64)
    pe = layers.EmbedND(32, 10000, [8, 12, 12])(torch.arange(18).view(1, 6, 3))
    with torch.no_grad():
        torch.testing.assert_close(block(x, vec, pe), stock(x, vec, pe))


# ---------------------------------------------------------------- compile


# dynamo looks at the gradient of the block's input, which is no leaf
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("with_positions", [False, True])
def test_blocks_compile_in_one_graph_and_do_not_recompile(family, with_positions, plugins):
    torch._dynamo.reset()
    (model, _), stock = converted(family, plugins), models.build(family)
    convert_model(model, ["npu_rms_norm"], plugins=plugins)
    positions = torch.stack((torch.arange(16) % 5, torch.arange(16) % 11))
    kwargs = {"positions": positions} if with_positions else {}
    want = models.run(stock, family, **kwargs)
    model.layers["0"].compile(backend="aot_eager", fullgraph=True)
    models.assert_alike(models.run(model, family, **kwargs), want, 1e-5)
    with torch._dynamo.config.patch(error_on_recompile=True):
        models.assert_alike(models.run(model, family, **kwargs), want, 1e-5)


def test_whole_model_compiles_in_one_graph(plugins):
    torch._dynamo.reset()
    (model, _), stock = converted("llama3", plugins), models.build("llama3")
    convert_model(model, ["npu_rms_norm"], plugins=plugins)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    tokens = models.tokens_for()
    torch.testing.assert_close(compiled(tokens), stock(tokens), rtol=1e-5, atol=1e-5)
