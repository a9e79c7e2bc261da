"""Collectives between the ranks of one torchrun, on device npu with backend hccl.

    torchrun --nproc-per-node N -m tests.virtual_npu.ranks OUT

Every rank runs all functions ``check_*`` in order and writes what failed to ``OUT.<rank>``. A check
gets the rank ``r`` and the number of ranks ``n``.
"""

import json
import os
import sys
import traceback
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as funcol
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

REDUCIBLE = (
    torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.int8,
)  # fmt: skip
MOVABLE = (*REDUCIBLE, torch.float64, torch.bool, torch.uint8)


def full(value, *shape, dtype=torch.float32):
    return torch.full(shape, value, dtype=dtype, device="npu")


def same(got, want):
    want = torch.as_tensor(want, device="cpu")
    assert got.device.type == "npu"
    assert torch.equal(got.cpu(), want.to(got.dtype)), f"{got.tolist()} is not {want.tolist()}"


def check_devices(r, n):
    assert dist.get_backend() == "hccl"
    assert torch.npu.current_device() == r
    assert dist.group.WORLD._get_backend(torch.device("npu")).name() == "hccl"


def check_all_reduce(r, n):
    for dtype in REDUCIBLE:
        for op, want in (
            (dist.ReduceOp.SUM, n * (n + 1) // 2),
            (dist.ReduceOp.PRODUCT, torch.arange(1, n + 1, device="cpu").prod()),
            (dist.ReduceOp.MAX, n),
            (dist.ReduceOp.MIN, 1),
        ):
            x = full(r + 1, 2, 3, dtype=dtype)
            dist.all_reduce(x, op)
            same(x, torch.full((2, 3), int(want), device="cpu"))


def check_all_reduce_average(r, n):
    for dtype in (torch.float32, torch.bfloat16):
        x = full(2.0 * r + 1, 3, dtype=dtype)
        dist.all_reduce(x, dist.ReduceOp.AVG)
        same(x, [float(n)] * 3)


def check_all_reduce_with_a_factor(r, n):
    x = full(r + 1.0, 3)
    dist.all_reduce(x, dist._make_nccl_premul_sum(0.5))
    same(x, [n * (n + 1) / 4] * 3)


def check_all_reduce_of_16_bit_floats_sums_in_32(r, n):
    # 256 + 1 + 1 is 258 when each step keeps 24 bits, 256 when each is rounded to bfloat16
    x = full(256.0 if r == 0 else 2.0 / (n - 1), 1, dtype=torch.bfloat16)
    dist.all_reduce(x)
    same(x, [258.0])


def check_nan_is_seen_by_everybody(r, n):
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.MIN):
        x = full(float("nan") if r == n - 1 else 1.0, 2)
        dist.all_reduce(x, op)
        assert x.isnan().all()


def check_bool_reduces_like_logic(r, n):
    x = torch.tensor([r == 0, False, True], device="npu")
    dist.all_reduce(x, dist.ReduceOp.MAX)
    same(x, [True, False, True])


def check_float64_is_refused_in_reductions(r, n):
    words = "Unsupported data type at::kDouble"
    with pytest.raises(RuntimeError, match=words):
        dist.all_reduce(full(1, 2, dtype=torch.float64))


def check_all_gather(r, n):
    for dtype in MOVABLE:
        x = (full(r, 2, 3) % (2 if dtype is torch.bool else 9)).to(dtype)
        parts = [torch.empty_like(x) for _ in range(n)]
        dist.all_gather(parts, x)
        flat = torch.empty(2 * n, 3, dtype=dtype, device="npu")
        dist.all_gather_into_tensor(flat, x)
        for i, part in enumerate(parts):
            want = torch.full((2, 3), i % 2 if dtype is torch.bool else i, device="cpu")
            same(part, want)
            same(flat[2 * i : 2 * i + 2], want)


def check_all_gather_of_unequal_lengths(r, n):
    parts = [torch.empty(i + 1, device="npu") for i in range(n)]
    dist.all_gather(parts, full(r, r + 1))
    for i, part in enumerate(parts):
        same(part, [float(i)] * (i + 1))


def check_reduce_scatter(r, n):
    for dtype in REDUCIBLE:
        parts = [full(10 * i + r, 2, dtype=dtype) for i in range(n)]
        out = torch.empty(2, dtype=dtype, device="npu")
        want = [n * 10 * r + n * (n - 1) // 2] * 2
        dist.reduce_scatter(out, parts)
        same(out, want)
        dist.reduce_scatter_tensor(out.zero_(), torch.cat(parts))
        same(out, want)


def check_reduce_scatter_average(r, n):
    out = torch.empty(1, device="npu")
    dist.reduce_scatter_tensor(out, torch.arange(n, device="npu") + 2.0 * r, dist.ReduceOp.AVG)
    same(out, [r + n - 1.0])


def check_reduce_scatter_of_unequal_lengths(r, n):
    out = torch.empty(r + 1, device="npu")
    dist.reduce_scatter(out, [full(i, i + 1) for i in range(n)])
    same(out, [float(n * r)] * (r + 1))


def check_all_to_all_single(r, n):
    x, out = torch.arange(n, device="npu") + 10 * r, torch.empty(n, dtype=torch.int64, device="npu")
    dist.all_to_all_single(out, x)
    same(out, [10 * i + r for i in range(n)])


def check_all_to_all_single_with_splits(r, n):
    # rank r sends i + r elements to rank i, nothing from 0 to 0
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        lengths = [i + r for i in range(n)]
        x = torch.cat([full(10 * r + i, i + r, 2, dtype=dtype) for i in range(n)])
        out = torch.empty(sum(lengths), 2, dtype=dtype, device="npu")
        dist.all_to_all_single(out, x, lengths, lengths)
        want = [[10.0 * i + r] * 2 for i in range(n) for _ in range(i + r)]
        same(out, want)


def check_all_to_all_of_lists(r, n):
    out = [torch.empty(i + r, device="npu") for i in range(n)]
    dist.all_to_all(out, [full(10 * r + i, i + r) for i in range(n)])
    for i, part in enumerate(out):
        same(part, [10.0 * i + r] * (i + r))


def check_broadcast(r, n):
    for root in range(n):
        for dtype in (torch.float64, torch.bfloat16, torch.int64, torch.bool):
            x = full(r == root, 5, dtype=dtype)
            dist.broadcast(x, root)
            same(x, [1] * 5)


def check_reduce(r, n):
    for root in range(n):
        x = full(r + 1, 3)
        dist.reduce(x, root)
        if r == root:
            same(x, [n * (n + 1) / 2] * 3)


def check_scatter(r, n):
    out = torch.empty(2, device="npu")
    dist.scatter(out, [full(i + 5, 2) for i in range(n)] if r == n - 1 else None, src=n - 1)
    same(out, [r + 5.0] * 2)


def check_gather(r, n):
    parts = [torch.empty(2, device="npu") for _ in range(n)] if r == 0 else None
    with warnings.catch_warnings():
        # torch_npu says that it gathers on all ranks
        warnings.simplefilter("ignore")
        dist.gather(full(r, 2), parts, dst=0)
    for i, part in enumerate(parts or ()):
        same(part, [float(i)] * 2)


def check_send_and_receive(r, n):
    if r == 0:
        dist.send(full(7, 3, dtype=torch.bfloat16), 1)
        dist.send(full(8, 3, dtype=torch.bfloat16), 1)
    if r == 1:
        for want in (7, 8):
            x = torch.empty(3, dtype=torch.bfloat16, device="npu")
            dist.recv(x, 0)
            same(x, [want] * 3)


def check_isend_and_irecv(r, n):
    x, out = full(r, 3), torch.empty(3, device="npu")
    works = [dist.isend(x, (r + 1) % n), dist.irecv(out, (r - 1) % n)]
    for work in works:
        work.wait()
    same(out, [float((r - 1) % n)] * 3)


def check_batch_isend_irecv(r, n):
    x, out = full(r, 1 << 18), torch.empty(1 << 18, device="npu")
    # receives first: on a device they run together
    operations = [
        dist.P2POp(dist.irecv, out, (r - 1) % n), dist.P2POp(dist.isend, x, (r + 1) % n)
    ]  # fmt: skip
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    same(out, torch.full((1 << 18,), float((r - 1) % n), device="cpu"))


def check_work_handles(r, n):
    x = full(r, 3)
    work = dist.all_reduce(x, async_op=True)
    work.wait()
    torch.npu.synchronize()
    assert work.is_completed()
    same(x, [n * (n - 1) / 2] * 3)


def check_barrier(r, n):
    store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=False)
    store.add("arrived", 1)
    dist.barrier()
    assert store.add("arrived", 0) == n


def check_objects(r, n):
    seen = [None] * n
    dist.all_gather_object(seen, {"rank": r, "text": "x" * r})
    assert seen == [{"rank": i, "text": "x" * i} for i in range(n)]
    given = [("from", r), r]
    dist.broadcast_object_list(given, src=1)
    assert given == [("from", 1), 1]
    mine = [None]
    dist.scatter_object_list(mine, [f"for {i}" for i in range(n)] if r == 0 else None, src=0)
    assert mine == [f"for {r}"]


def check_functional_collectives(r, n):
    world = dist.group.WORLD
    same(funcol.all_reduce(full(r, 2), "sum", world), [n * (n - 1) / 2] * 2)
    same(funcol.all_reduce(full(2.0 * r, 2), "avg", world), [n - 1.0] * 2)
    same(funcol.all_gather_tensor(full(r, 1), 0, world), [float(i) for i in range(n)])
    same(funcol.reduce_scatter_tensor(torch.arange(n, device="npu"), "sum", 0, world), [n * r])
    same(funcol.broadcast(full(r, 1), 1, world), [1.0])
    sizes = [1 + r] * n
    got = funcol.all_to_all_single(full(r, n * (1 + r)), [1 + i for i in range(n)], sizes, world)
    same(got, [float(i) for i in range(n) for _ in range(1 + i)])


def check_inputs_that_are_not_contiguous(r, n):
    x = (torch.arange(6, device="npu") + 10.0 * r).view(2, 3).t()
    want = torch.arange(6.0, device="cpu").view(2, 3).t()
    # functional collectives copy, the others refuse as torch_npu does on a device
    same(funcol.all_reduce(x, "sum", dist.group.WORLD), n * want + 5 * n * (n - 1))
    same(funcol.all_gather_tensor(x, 0, dist.group.WORLD)[3 * r : 3 * r + 3], want + 10 * r)
    parts = [torch.empty(3, 2, device="npu") for _ in range(n)]
    with pytest.raises(RuntimeError, match="must be contiguous"):
        dist.all_gather(parts, x)


def check_empty_tensors(r, n):
    x = torch.empty(0, device="npu")
    dist.all_reduce(x)
    out = torch.empty(0, 4, device="npu")
    dist.all_gather_into_tensor(out, torch.empty(0, 4, device="npu"))
    dist.all_to_all_single(out, out.clone(), [0] * n, [0] * n)
    dist.broadcast(x, 0)
    assert x.shape == (0,)
    assert out.shape == (0, 4)


def check_data_longer_than_one_chunk(r, n):
    count = 3_000_001
    x = torch.arange(count, device="npu") % 1000 + r
    want = torch.arange(count, device="cpu") % 1000
    gathered = torch.empty(n * count, dtype=torch.int64, device="npu")
    dist.all_gather_into_tensor(gathered, x)
    for i in range(n):
        same(gathered[i * count : (i + 1) * count], want + i)
    dist.all_reduce(x)
    same(x, n * want + n * (n - 1) // 2)


def check_subgroups(r, n):
    ones = [dist.new_group([i]) for i in range(n)]
    x = full(r, 2)
    dist.all_reduce(x, group=ones[r])
    same(x, [float(r)] * 2)
    order = list(range(n))[::-1]
    group = dist.new_group(order, use_local_synchronization=False)
    parts = [torch.empty(1, device="npu") for _ in range(n)]
    dist.all_gather(parts, full(r, 1), group=group)
    # a group sorts its ranks
    same(torch.cat(parts), [float(i) for i in range(n)])
    if n > 2:
        some = dist.new_group([1, n - 1])
        if r in (1, n - 1):
            x = full(r, 2)
            dist.all_reduce(x, group=some)
            same(x, [float(n)] * 2)
            dist.broadcast(x.fill_(r), n - 1, group=some)
            same(x, [n - 1.0] * 2)


def check_mesh(r, n):
    rows = n // 2
    mesh = init_device_mesh("npu", (rows, 2), mesh_dim_names=("dp", "tp"))
    x = full(r, 1)
    same(funcol.all_reduce(x, "sum", mesh["tp"]), [4.0 * (r // 2) + 1])
    same(funcol.all_reduce(x, "sum", mesh["dp"]), [sum(range(r % 2, n, 2))])
    whole = torch.arange(24.0, device="npu").view(4, 6)
    for layout in ([Shard(0), Shard(1)], [Replicate(), Shard(0)], [Shard(1), Replicate()]):
        part = distribute_tensor(whole, mesh, layout)
        same(part.full_tensor(), whole.cpu())
        same((part @ part.t()).full_tensor(), (whole @ whole.t()).cpu())


def check_random_numbers_of_ranks_with_one_seed_are_equal(r, n):
    torch.npu.manual_seed(5)
    parts = [torch.empty(4, device="npu") for _ in range(n)]
    dist.all_gather(parts, torch.randn(4, device="npu"))
    for part in parts:
        assert torch.equal(part, parts[0])


CHECKS = [name for name in globals() if name.startswith("check_")]


def main(out):
    r, n = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.npu.set_device(r)
    dist.init_process_group("hccl")
    failed = {}
    for name in CHECKS:
        try:
            globals()[name](r, n)
        except Exception:
            failed[name] = traceback.format_exc()
    Path(f"{out}.{r}").write_text(json.dumps(failed))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
