"""The parser of schemas against torch's own."""

import pytest
import torch

from torchtitan_npu_core.schemas import generations, parse_schema


@pytest.mark.parametrize("generation", generations(), ids=lambda g: g.name)
def test_torch_reads_every_shipped_schema_alike(generation):
    for text in generation.schemas.values():
        ours, torchs = parse_schema(text), torch._C.parse_schema(text)
        assert len(ours.returns) == len(torchs.returns), text
        for a, b in zip(ours.arguments, torchs.arguments, strict=True):
            assert a.name == b.name, text
            assert a.keyword_only == b.kwarg_only, text
            assert (a.default is not None) == b.has_default_value(), text
