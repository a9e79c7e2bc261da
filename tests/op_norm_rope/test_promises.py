"""The promises every converter makes, checked with the kit that plugin authors use."""

import pytest
import torch
from torch import nn

from tests.op_norm_rope.test_tables import Mine
from torchtitan_npu_core.testing import check_converter, check_operator


class Attention(nn.Module):
    """A norm and a rotary embedding with parameters around them."""

    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(8, 8)
        self.norm = nn.RMSNorm(8)
        self.rotary = Mine()

    def forward(self, x, cache):
        return self.rotary(self.norm(self.proj(x)), cache)


def inputs():
    # the table is no parameter of a model: it comes without gradient
    angle = torch.outer(torch.arange(6.0), torch.tensor([1.0, 0.1, 0.01, 0.001]))
    wide = torch.cat((angle, angle), -1)
    return [torch.randn(2, 5, 3, 8), Table(torch.cat((wide.cos(), wide.sin()), -1))]


class Table:
    """Keeps the kit from asking for the table's gradient."""

    def __init__(self, tensor):
        self.tensor = tensor


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = Attention()

    def forward(self, x, table):
        return self.attention(x, table.tensor)


@pytest.mark.parametrize("name", ["npu_rms_norm", "npu_rope"])
def test_converter_keeps_every_promise(name):
    check_converter(name, model=Model, inputs=inputs)


def test_operator_passes_opcheck_through_the_kit():
    check_operator("npu::npu_rms_norm", torch.randn(2, 8), torch.ones(8))
