"""One virtual device: memory, kernels, random numbers, and torch_npu's own code above them."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from torchtitan_npu_core.errors import DeviceLimitError, NoReferenceError, OperatorArgumentError
from torchtitan_npu_core.loading import discover_and_load
from torchtitan_npu_core.operators import (
    OperatorKernels,
    device_family,
    register_operator,
    registered_operators,
)
from torchtitan_npu_core.operators import declared_specs as declared

npu = torch.ops.npu


@pytest.fixture(scope="module", autouse=True)
def _operators():
    for spec in declared(discover_and_load()).values():
        register_operator(spec)


def test_it_is_the_published_torch_npu_that_runs():
    import torch_npu

    assert torch_npu.npu.is_available()
    assert torch.npu.device_count() == 2
    assert torch.npu.get_device_name(0) == "Ascend910B1"
    assert device_family() == "a2"
    assert "torch_npu" in torch_npu.__file__
    assert {r.provider for r in registered_operators().values()} == {"torch_npu"}


# ---------------------------------------------------------------- memory


@pytest.mark.parametrize("device", ["npu:0", "npu:1"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_memory_nobody_wrote_is_nan(device, dtype):
    # also where the allocator hands out a block that was in use
    for _ in range(3):
        x = torch.empty(37, dtype=dtype, device=device)
        assert x.device == torch.device(device)
        assert x.isnan().all()
        x.zero_()
        assert torch.empty_like(x).isnan().all()
        assert torch.empty_strided((3, 2), (1, 3), dtype=dtype, device=device).isnan().all()
        assert x.new_empty(5).isnan().all()


def test_unwritten_indices_are_out_of_range():
    index = torch.empty(4, dtype=torch.int64, device="npu")
    with pytest.raises((IndexError, RuntimeError)):
        torch.ones(10, device="npu")[index]


def test_statistics_follow_what_is_allocated():
    torch.npu.empty_cache()
    torch.npu.reset_peak_memory_stats()
    before = torch.npu.memory_allocated()
    x = torch.ones(1 << 20, device="npu")
    # the allocator adds 32 bytes and rounds up to 512
    assert torch.npu.memory_allocated() - before == (4 << 20) + 512
    del x
    assert torch.npu.memory_allocated() == before
    assert torch.npu.max_memory_allocated() - before >= 4 << 20
    free, total = torch.npu.mem_get_info()
    assert 0 < free < total == 64 << 30
    assert torch.npu.memory_stats()["num_ooms"] == 0


def test_more_than_the_device_has_is_out_of_memory():
    with pytest.raises(torch.OutOfMemoryError):
        torch.npu.caching_allocator_alloc(65 << 30)


def test_streams_and_events():
    stream = torch.npu.Stream()
    start, end = (torch.npu.Event(enable_timing=True) for _ in range(2))
    x = torch.ones(8, device="npu")
    with torch.npu.stream(stream):
        start.record()
        y = x + 1
        end.record()
    y.record_stream(torch.npu.current_stream())
    torch.npu.current_stream().wait_stream(stream)
    torch.npu.synchronize()
    assert end.query()
    assert start.elapsed_time(end) >= 0
    assert y.tolist() == [2.0] * 8


def test_devices_are_apart():
    x = torch.ones(3, device="npu:1")
    assert (x + 1).device == torch.device("npu:1")
    with torch.npu.device(1):
        assert torch.zeros(1, device="npu").device.index == 1
    assert torch.equal(x.to("npu:0").cpu(), x.cpu())
    with pytest.raises((RuntimeError, ValueError, AssertionError)):
        torch.npu.set_device(2)


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize(
    "make",
    [
        torch.empty_like, torch.zeros_like, torch.ones_like, torch.rand_like, torch.Tensor.to,
        lambda x, device: torch.full_like(x, 2, device=device),
        lambda x, device: x.new_empty(2, device=device),
        lambda x, device: x.new_empty_strided((2, 2), (1, 2), device=device),
        lambda x, device: x.new_ones(2, device=device),
        lambda x, device: x.new_tensor([1.0], device=device),
    ],
)  # fmt: skip
def test_other_devices_can_be_named_where_an_npu_tensor_is_the_model(make, device):
    made = make(torch.ones(2, 3, device="npu"), device=device)
    assert made.device.type == device
    assert made.dtype == torch.float32


def test_tensors_of_two_devices_do_not_meet():
    x, other = torch.ones(3, device="npu"), torch.ones(3, device="cpu")
    for call in (
        lambda: x + other,
        lambda: x.add_(other),
        lambda: torch.cat((x, other)),
        lambda: torch.add(x, x, out=torch.empty(3, device="cpu")),
        lambda: x + torch.ones(3, device="npu:1"),
        lambda: npu.npu_rms_norm(x, other),
        lambda: other[torch.tensor([0, 2], device="npu")],
    ):
        with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
            call()
    # numbers and indices may come from the CPU
    assert (x * torch.tensor(2.0, device="cpu")).tolist() == [2.0] * 3
    assert x[torch.tensor([0, 2], device="cpu")].device.type == "npu"


# ---------------------------------------------------------------- kernels

SAME = {
    "strided": lambda x: x.t()[1:, ::2] * 2,
    "cat": lambda x: torch.cat((x, x.t().contiguous().view(x.shape)), 1),
    "sort": lambda x: torch.sort(x, dim=1, stable=True),
    "topk": lambda x: torch.topk(x, 3, dim=-1),
    "var_mean": lambda x: torch.var_mean(x, 0),
    "index_put": lambda x: x.clone().index_put_((torch.arange(2, device=x.device),), x[2:4]),
    "scatter": lambda x: torch.zeros_like(x).scatter_add_(0, (x > 0).long(), x),
    "out": lambda x: torch.add(x, 1, out=torch.empty(0, device=x.device)),
    "two outs": lambda x: torch.sort(
        x, out=(torch.empty(0, device=x.device), torch.empty(0, device=x.device).long())
    ),
    "complex": lambda x: torch.view_as_real(torch.complex(x, x.neg()).conj() * 2),
    "polar": lambda x: torch.view_as_real(torch.polar(torch.ones_like(x), x)),
    "foreach": lambda x: torch._foreach_add([x, x * 2], 1),
    "bool mask": lambda x: x[x > 0],
    "split": lambda x: torch.split(x, 2),
    "einsum": lambda x: torch.einsum("ij,kj->ik", x, x),
    "where": lambda x: torch.where(x > 0, x, 0.5),
    "cumsum": lambda x: torch.cumsum(x, 0),
    "cast": lambda x: x.bfloat16().float(),
    "int": lambda x: (x * 10).int() // 3,
    "scalar": lambda x: x.sum().item() * x,
    "empty": lambda x: x[:0].sum(0),
    "histc": lambda x: torch.histc(x, 4, 0, 3),
    "fill_diagonal": lambda x: x.clone().fill_diagonal_(1),
    "one hot": lambda x: F.one_hot((x > 0).long(), 3),
    "arange": lambda x: torch.arange(0, 9, 2, device=x.device),
    "nonzero": lambda x: torch.nonzero(x > 0),
    "triu": lambda x: torch.triu(x, 1),
    "softmax": lambda x: torch.softmax(x.bfloat16(), -1).float(),
    "cpu and back": lambda x: x.cpu().to(x.device),
}


@pytest.mark.parametrize("name", SAME)
def test_kernels_give_the_cpus_numbers(name):
    x = torch.randn(5, 6, device="cpu")
    leaves = torch.utils._pytree.tree_leaves
    want, got = leaves(SAME[name](x)), leaves(SAME[name](x.npu()))
    assert len(want) == len(got)
    for a, b in zip(want, got, strict=True):
        assert b.device.type == "npu"
        assert (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride())
        assert torch.equal(a, b.cpu())


def test_in_place_changes_are_seen_through_views():
    x = torch.zeros(4, 4, device="npu")
    view = x.t()[1]
    x.add_(1)
    view.mul_(3)
    assert x[:, 1].tolist() == [3.0] * 4
    assert x.sum().item() == 24


GRADIENTS = {
    "linear": (lambda x, w: F.linear(x, w), (3, 5, 8), (4, 8)),
    "matmul": (lambda x, w: x @ w, (2, 3, 8), (2, 8, 5)),
    "matmul, broadcast": (lambda x, w: x @ w, (4, 1, 3, 8), (2, 8, 5)),
    "vector": (lambda x, w: x @ w, (8,), (8, 5)),
    "dot": (lambda x, w: x @ w, (8,), (8,)),
    "times vector": (lambda x, w: x @ w, (3, 8), (8,)),
    "attention": (
        lambda x, w: F.scaled_dot_product_attention(x, w, w, is_causal=True, enable_gqa=True),
        (2, 4, 6, 8),
        (2, 2, 6, 8),
    ),
    "gather": (lambda x, w: torch.gather(x, 1, (w > 0).long()), (4, 5), (4, 3)),
    "repeat": (lambda x, w: torch.repeat_interleave(x, 3, dim=1) * w, (2, 4), (2, 12)),
    "max": (lambda x, w: (x * w).max(1).values, (4, 5), (4, 5)),
    "embedding": (lambda x, w: F.embedding((x > 0).long(), w), (3, 4), (6, 2)),
    "rms norm": (lambda x, w: F.rms_norm(x, (8,), w, 1e-5), (3, 8), (8,)),
    "cross entropy": (
        lambda x, w: F.cross_entropy(x, w.argmax(1), reduction="none"),
        (4, 7),
        (4, 7),
    ),
    "cast": (lambda x, w: (x.bfloat16() * w.bfloat16()).float(), (4, 7), (7,)),
    "silu": (lambda x, w: F.silu(x) * w, (4, 7), (4, 7)),
}


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients_through_torch_npus_formulas_equal_the_cpus(name):
    function, *shapes = GRADIENTS[name]

    def run(device):
        generator = torch.Generator("cpu").manual_seed(3)
        inputs = [
            torch.randn(s, generator=generator, device="cpu").to(device).requires_grad_()
            for s in shapes
        ]
        out = function(*inputs)
        weight = torch.randn(out.shape, generator=generator, device="cpu").to(device)
        grads = torch.autograd.grad((out * weight).sum(), inputs, allow_unused=True)
        return [out.detach(), *(g for g in grads if g is not None)]

    for a, b in zip(run("cpu"), run("npu"), strict=True):
        torch.testing.assert_close(b.cpu(), a)


ATTENTION = {
    "causal": {"is_causal": True},
    "all": {},
    "mask": {"mask": lambda n, m: torch.ones(n, m, dtype=torch.bool).tril(m - n)},
    "mask per sample": {"mask": lambda n, m: torch.arange(2 * n * m).view(2, 1, n, m) % 3 > 0},
    "added mask": {"mask": lambda n, m: torch.arange(float(n * m)).view(n, m) / 7},
    "own scale": {"is_causal": True, "scale": 0.1},
}


@pytest.mark.parametrize("sizes", [(2, 5, 5), (4, 3, 7), (2, 1, 1)], ids=str)
@pytest.mark.parametrize("name", ATTENTION)
def test_attention_goes_through_torch_npus_operator(name, sizes):
    heads, num_queries, num_keys = sizes
    options = dict(ATTENTION[name])
    if options.get("is_causal") and num_queries != num_keys:
        pytest.skip("torch_npu takes such shapes as not causal")
    mask = options.pop("mask", None)

    def run(device, dtype):
        generator = torch.Generator("cpu").manual_seed(3)

        def draw(*shape):
            x = torch.randn(shape, generator=generator, device="cpu")
            return x.to(device, dtype).requires_grad_()

        q = draw(2, heads, num_queries, 8)
        k, v = draw(2, heads // 2, num_keys, 8), draw(2, heads // 2, num_keys, 8)
        with torch.device("cpu"):
            given = None if mask is None else mask(num_queries, num_keys)
        given = None if given is None else given.to(device)
        if given is not None and given.is_floating_point():
            given = given.to(dtype)
        out = F.scaled_dot_product_attention(q, k, v, given, enable_gqa=True, **options)
        weight = torch.arange(out.numel(), device="cpu").view(out.shape) % 5 - 2.0
        (out * weight.to(device, dtype)).sum().backward()
        return [x.float().cpu() for x in (out.detach(), q.grad, k.grad, v.grad)]

    want = run("cpu", torch.float32)
    for a, b in zip(want, run("npu", torch.float32), strict=True):
        torch.testing.assert_close(b, a, rtol=1e-5, atol=1e-5)
    for a, b in zip(want, run("npu", torch.bfloat16), strict=True):
        assert (b - a).norm() <= 0.02 * a.norm() + 1e-3


def test_attention_drops_the_same_weights_forward_and_backward():
    q, k, v = torch.randn(3, 1, 2, 6, 8, device="npu").unbind()
    v.requires_grad_()
    torch.npu.manual_seed(4)
    out = F.scaled_dot_product_attention(q, k, v, dropout_p=0.5)
    assert not torch.equal(out, F.scaled_dot_product_attention(q, k, v))
    weight = torch.randn_like(out)
    (grad,) = torch.autograd.grad((out * weight).sum(), v)
    # the output is linear in v
    torch.testing.assert_close((grad * v).sum(), (out * weight).sum())
    torch.npu.manual_seed(4)
    assert torch.equal(F.scaled_dot_product_attention(q, k, v, dropout_p=0.5), out)


def test_autocast_and_fused_adamw_train_alike():
    def train(device):
        torch.manual_seed(0)
        with torch.device("cpu"):
            model = nn.Sequential(nn.Linear(8, 16), nn.SiLU(), nn.Linear(16, 4))
            data = torch.randn(5, 8)
        model, data = model.to(device), data.to(device)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2, foreach=True)
        losses = []
        for _ in range(3):
            with torch.autocast(torch.device(device).type, torch.bfloat16):
                loss = model(data).square().mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            losses.append(loss.item())
        return losses

    assert train("npu") == pytest.approx(train("cpu"), rel=2e-2)
    assert len(set(train("npu"))) == 3


def test_integers_can_be_counted_unlike_on_the_cpu():
    x = torch.tensor([0, 1, 1, 3, 2, 1], device="npu")
    assert torch.histc(x, 4, 0, 3).tolist() == [1, 3, 1, 1]


def test_deep_copies_and_files_keep_values(tmp_path):
    model = nn.Linear(3, 4).npu()
    twin = copy.deepcopy(model)
    assert torch.equal(twin.weight, model.weight)
    torch.save(model.state_dict(), tmp_path / "m.pt")
    with torch.device("cpu"):  # torch_npu loads through tensors of the default device
        loaded = torch.load(tmp_path / "m.pt", weights_only=True)
    assert loaded["weight"].device.type == "npu"
    assert torch.equal(loaded["weight"].cpu(), model.weight.detach().cpu())


# ---------------------------------------------------------------- random numbers


def test_a_seed_names_a_stream_of_numbers():
    torch.npu.manual_seed(5)
    first, second = torch.randn(4, device="npu"), torch.randn(4, device="npu")
    assert not torch.equal(first, second)
    torch.npu.manual_seed(5)
    assert torch.equal(torch.randn(4, device="npu"), first)
    state = torch.npu.get_rng_state()
    assert torch.equal(torch.randn(4, device="npu"), second)
    torch.npu.set_rng_state(state)
    assert torch.equal(torch.randn(4, device="npu"), second)
    torch.manual_seed(5)  # seeds all devices
    assert torch.equal(torch.randn(4, device="npu"), first)


def test_numbers_on_the_cpu_are_left_alone():
    torch.manual_seed(1)
    want = torch.randn(3, device="cpu")
    torch.manual_seed(1)
    torch.randn(3, device="npu")
    F.dropout(torch.ones(8, device="npu"), 0.5)
    assert torch.equal(torch.randn(3, device="cpu"), want)


def test_generators_of_the_device():
    generator = torch.Generator("npu").manual_seed(7)
    a = torch.rand(3, generator=generator, device="npu")
    b = torch.rand(3, generator=generator, device="npu")
    assert not torch.equal(a, b)
    assert torch.equal(torch.rand(3, generator=generator.manual_seed(7), device="npu"), a)
    with pytest.raises(RuntimeError, match="npu"):
        torch.rand(3, generator=torch.Generator("cpu"), device="npu")


@pytest.mark.parametrize("size", [1, 100, 1000])
def test_dropout_masks_forward_and_backward_alike(size):
    x = torch.ones(size, device="npu", requires_grad=True)
    y = F.dropout(x, 0.25)
    y.sum().backward()
    assert torch.equal(y, x.grad)
    assert set(y.tolist()) <= {0.0, 1 / 0.75} | {float(torch.tensor(1 / 0.75))}
    if size == 1000:
        assert 650 < (y > 0).sum().item() < 850


def test_recomputation_draws_the_same_numbers():
    from torch.utils.checkpoint import checkpoint

    x = torch.ones(64, device="npu", requires_grad=True)
    y = checkpoint(lambda t: F.dropout(t, 0.5) * t, x, use_reentrant=False)
    y.sum().backward()
    assert torch.equal(x.grad, 2 * y.detach())


# ---------------------------------------------------------------- fused operators


def test_references_run_below_torch_npus_autograd():
    x, gamma = torch.randn(3, 8, device="npu"), torch.randn(8, device="npu")
    x.requires_grad_()
    y, rstd = npu.npu_rms_norm(x, gamma)
    assert type(y.grad_fn).__name__ == "NpuRmsNormBackward0"
    assert not rstd.requires_grad
    y.sum().backward()
    want = torch.autograd.grad(F.rms_norm(x, (8,), gamma, 1e-6).sum(), x)[0]
    torch.testing.assert_close(x.grad, want)


def test_checks_and_limits_of_the_family():
    with pytest.raises(OperatorArgumentError, match="trailing dims"):
        npu.npu_rms_norm(torch.ones(2, 8, device="npu"), torch.ones(4, device="npu"))
    x, table = torch.ones(1, 2, 1, 896, device="npu"), torch.ones(1, 2, 1, 896, device="npu")
    with pytest.raises(DeviceLimitError, match="a2"):
        npu.npu_rotary_mul(x, table, table)


def test_gradients_the_device_does_not_write_are_nan():
    x, table = torch.randn(1, 3, 2, 4, device="npu"), torch.randn(1, 3, 1, 4, device="npu")
    dx, dcos, dsin = npu.npu_rotary_mul_backward(x, x, table, table)
    assert torch.isfinite(dx).all()
    assert dcos.isnan().all()
    assert dsin.isnan().all()
    y = npu.npu_rotary_mul(x, table.requires_grad_(), table)
    y.sum().backward()
    assert torch.isfinite(table.grad).all()


def test_operators_nobody_declares_fail_with_their_name():
    x = torch.ones(4, 8, device="npu")
    with pytest.raises(NoReferenceError, match="npu_swiglu"):
        npu.npu_swiglu(x)


def test_operators_run_past_the_dispatcher_fail_with_their_name():
    # torch_npu's kernel for this one asks CANN's compiler for an operator, from C++
    x, weight, bias = (torch.ones(s, device="npu") for s in ((4, 1, 8), (1, 8, 8), (8,)))
    with pytest.raises(RuntimeError, match="Conv2DBackpropInput has no kernel on a virtual NPU"):
        torch.ops.aten.conv_tbc_backward(x, x, weight, bias, 0)


def test_declared_kernels_are_plain(tmp_path):
    assert all(isinstance(r.kernels, OperatorKernels) for r in registered_operators().values())
