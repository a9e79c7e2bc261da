"""Which modules are claimed, and why others are refused."""

import copy

import pytest
import torch
from torch import nn
from torchtitan_npu_core.apply import convert_model
from torchtitan_npu_core.errors import UnmatchedConverterError
from torchtitan_npu_core.plan import Replacement, Skip

from acme_torchtitan_npu_gelu.converter import ScaledGELUConverter

NAME = "acme_scaled_gelu"


class PlainSubclass(nn.GELU):
    pass


class OtherMathematics(nn.GELU):
    def forward(self, input):
        return super().forward(input) + 1


def claim(module, scale=1.0):
    return ScaledGELUConverter({"scale": scale}).claim("act", module, module)


@pytest.mark.parametrize("cls", [nn.GELU, PlainSubclass])
def test_tanh_gelu_is_claimed(cls):
    answer = claim(cls(approximate="tanh"))
    assert isinstance(answer, Replacement)
    assert issubclass(answer.cls, cls)
    assert answer.note == ""


def test_note_says_that_a_scale_changes_the_mathematics():
    assert claim(nn.GELU(approximate="tanh"), scale=0.5).note == (
        "scale 0.5 changes the mathematics"
    )


def test_exact_gelu_is_refused_with_its_reason():
    answer = claim(nn.GELU())
    assert isinstance(answer, Skip)
    assert "approximate is 'none'" in answer.reason


def test_subclass_with_its_own_forward_is_refused():
    assert "OtherMathematics has a forward of its own" in claim(OtherMathematics("tanh")).reason


def test_instance_with_a_replaced_forward_is_refused():
    module = nn.GELU(approximate="tanh")
    module.forward = torch.relu
    assert "replaced on the instance" in claim(module).reason


@pytest.mark.parametrize("module", [nn.ReLU(), nn.SiLU(), nn.Linear(2, 2), nn.Sequential()])
def test_other_modules_are_none_of_its_business(module):
    assert claim(module) is None


def test_model_with_only_exact_gelu_is_an_error_that_repeats_the_reason():
    model = nn.Sequential(nn.Linear(2, 2), nn.GELU())
    with pytest.raises(UnmatchedConverterError, match="1: approximate is 'none'"):
        convert_model(model, [NAME])
    assert type(model[1]) is nn.GELU


def test_refused_module_in_a_converted_model_keeps_its_class_and_numbers():
    model = nn.Sequential(nn.GELU(approximate="tanh"), nn.GELU())
    stock, x = copy.deepcopy(model), torch.randn(4, 3)
    result = convert_model(model, [NAME])
    assert result.replaced[NAME] == ["0"]
    assert [fqn for fqn, _ in result.skipped[NAME]] == ["1"]
    assert type(model[1]) is nn.GELU
    assert torch.equal(model[1](x), stock[1](x))
