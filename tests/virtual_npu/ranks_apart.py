"""Two ranks that do not do the same, on device npu with backend hccl.

    python -m tests.virtual_npu.ranks_apart OUT      (one process per rank)

Writes the error of each case to ``OUT.<rank>``; rank 1 ends without a word in the last one.
"""

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

CASES = ("late", "other collective", "other length", "message of another length", "ended")


def late(r, group, store):
    if r == 0:
        try:
            dist.barrier(group=group)
        finally:
            store.set("waited", "")
    else:
        store.wait(["waited"])


def other_collective(r, group, store):
    x = torch.ones(2, device="npu")
    dist.all_reduce(x, group=group) if r == 0 else dist.broadcast(x, 0, group=group)


def other_length(r, group, store):
    dist.all_reduce(torch.ones(2 + r, device="npu"), group=group)


def message_of_another_length(r, group, store):
    x = torch.ones(2 + r, device="npu")
    dist.recv(x, 1, group=group) if r == 0 else dist.send(x, 0, group=group)


def ended(r, group, store):
    if r == 1:
        os._exit(7)
    dist.all_reduce(torch.ones(2, device="npu"), group=group)


def main(out):
    r = int(os.environ["RANK"])
    torch.npu.set_device(r)
    dist.init_process_group("hccl")
    store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=False)
    groups = {name: dist.new_group([0, 1]) for name in CASES}
    seen = {}
    for name, group in groups.items():
        dist.all_reduce(torch.ones(1, device="npu"), group=group)
        try:
            globals()[name.replace(" ", "_")](r, group, store)
        except RuntimeError as error:
            seen[name] = str(error)
        Path(f"{out}.{r}").write_text(json.dumps(seen))


if __name__ == "__main__":
    main(sys.argv[1])
