"""What one device family makes of a few calls, as JSON: name, family, and the error of each call.

python -m tests.virtual_npu.family
"""

import json

import torch

from torchtitan_npu_core.errors import DeviceLimitError
from torchtitan_npu_core.loading import discover_and_load
from torchtitan_npu_core.operators import declared_specs, device_family, register_operator


def rotate(width=8, mode="half", rows=1, grad=False):
    x = torch.ones(rows, 2, 1, width, device="npu")
    table = torch.ones(1, 2, 1, width, device="npu", requires_grad=grad)
    return torch.ops.npu.npu_rotary_mul(x, table, table, mode)


CALLS = {
    "half": lambda: rotate(),
    "quarter": lambda: rotate(mode="quarter"),
    "width 894": lambda: rotate(894),
    "width 896": lambda: rotate(896),
    "width 1024": lambda: rotate(1024),
    "width 1026": lambda: rotate(1026),
    "1000 rows": lambda: rotate(rows=1000),
    "9 dims": lambda: torch.ops.npu.npu_rms_norm(
        torch.ones((1,) * 8 + (4,), device="npu"), torch.ones(4, device="npu")
    ),
}


def error(call):
    try:
        assert torch.as_tensor(call()[0]).isfinite().all()
    except DeviceLimitError as limit:
        return str(limit)
    return ""


def main():
    for spec in declared_specs(discover_and_load()).values():
        register_operator(spec)
    x = torch.ones(3, device="npu").to(torch.bfloat16)
    print(
        json.dumps(
            {
                "name": torch.npu.get_device_name(0),
                "devices": torch.npu.device_count(),
                "family": device_family(),
                "sum": x.sum().item(),
                "unwritten": torch.empty(4, device="npu").isnan().all().item(),
                "errors": {name: error(call) for name, call in CALLS.items()},
            }
        )
    )


if __name__ == "__main__":
    main()
