"""The schemas core ships against those of the torch_npu that runs."""

import torch
import torch_npu

from torchtitan_npu_core.schemas import generation_of

# defined by torch_npu's Python files when they are imported, not by its library
IN_PYTHON = {
    "print_npugraph_tensor",
    "save_npugraph_tensor",
    "save_npugraph_tensor.tensor_list",
    "set_op_timeout_ms",
    "super_kernel_scope_begin",
    "super_kernel_scope_end",
}


def test_shipped_schemas_are_the_live_ones():
    shipped = generation_of(torch_npu.__version__).schemas
    live = {
        str(schema): f"{schema.name.removeprefix('npu::')}.{schema.overload_name}".rstrip(".")
        for schema in torch._C._jit_get_all_schemas()
        if schema.name.startswith("npu::")
    }
    ours = {str(torch._C.parse_schema(f"npu::{text}")) for text in shipped.values()}
    assert ours - set(live) == set()
    assert {live[text] for text in set(live) - ours} == IN_PYTHON
