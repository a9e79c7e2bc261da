"""The plugin as a user meets it: what it promises, its option, its hooks."""

import functools

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from torchtitan_npu_core.apply import ConversionResult, convert_model
from torchtitan_npu_core.errors import OptionValueError, UnknownOptionError
from torchtitan_npu_core.loading import discover_and_load
from torchtitan_npu_core.probe import OperatorProbe
from torchtitan_npu_core.testing import check_converter

from acme_torchtitan_npu_gelu import plugin

NAME = "acme_scaled_gelu"


def tiny_model():
    return nn.Sequential(
        nn.Linear(6, 10),
        nn.GELU(approximate="tanh"),
        nn.Linear(10, 5),
        nn.GELU(approximate="none"),
        nn.GELU(approximate="tanh"),
    )


def tiny_inputs():
    return [torch.randn(2, 7, 6)]


@pytest.fixture
def observed():
    plugin.recent_conversions.clear()
    yield plugin.recent_conversions
    plugin.recent_conversions.clear()


def test_converter_keeps_every_promise():
    check_converter(NAME, model=tiny_model, inputs=tiny_inputs)


def test_plugin_is_loaded_from_this_distribution():
    (record,) = [r for r in discover_and_load().records if r.name == "acme_gelu"]
    assert (record.state, record.distribution) == ("loaded", "acme-torchtitan-npu-gelu")
    assert [spec.name for spec in record.converters] == [NAME]


def test_scale_multiplies_the_activation():
    module, x = nn.GELU(approximate="tanh"), torch.randn(3, 5)
    expected = 2.5 * module(x)
    convert_model(module, [NAME], section={NAME: {"scale": 2.5}})
    torch.testing.assert_close(module(x), expected)
    assert repr(module) == "AcmeGELU(approximate='tanh', scale=2.5)"


def test_factor_that_changes_the_mathematics_is_announced_before_conversion(caplog):
    convert_model(tiny_model(), [NAME], section={NAME: {"scale": 2}})
    assert [
        r.getMessage() for r in caplog.records if "changes the mathematics" in r.getMessage()
    ] == ["[acme_scaled_gelu] scale 2.0 changes the mathematics"]
    caplog.clear()
    convert_model(tiny_model(), [NAME])
    assert "changes the mathematics" not in caplog.text


@pytest.mark.parametrize("scale", ["2", True, float("inf"), float("nan")])
def test_scale_that_is_no_finite_number_is_refused_and_changes_nothing(scale):
    model = tiny_model()
    with pytest.raises(OptionValueError, match=r"'scale' in \[npu.acme_scaled_gelu\]"):
        convert_model(model, [NAME], section={NAME: {"scale": scale}})
    assert {type(m) for m in model.children()} == {nn.Linear, nn.GELU}


def test_misspelt_option_is_refused_with_the_right_name():
    with pytest.raises(UnknownOptionError, match="Did you mean 'scale'"):
        convert_model(tiny_model(), [NAME], section={NAME: {"scales": 2.0}})


def test_observer_notes_what_was_converted(observed):
    convert_model(tiny_model(), [NAME])
    convert_model(nn.Sequential(nn.GELU(approximate="tanh")), [NAME])
    assert list(observed) == [("1", "4"), ("0",)]


def test_observer_ignores_conversions_that_replaced_nothing_of_its_own(observed):
    model = tiny_model()
    convert_model(model, [NAME])
    convert_model(model, [NAME])
    plugin.torchtitan_npu_after_conversion(ConversionResult(replaced={"other": ["1"]}))
    assert list(observed) == [("1", "4")]


def recompute_everything():
    return create_selective_checkpoint_contexts(
        lambda ctx, op, *args, **kwargs: CheckpointPolicy.PREFER_RECOMPUTE
    )


def test_selective_checkpointing_keeps_the_activation_instead_of_running_it_again():
    model = nn.Sequential(tiny_model())
    convert_model(model, [NAME])
    # the order of torchtitan: blocks are wrapped after the model was converted
    model[0] = checkpoint_wrapper(
        model[0], context_fn=functools.partial(recompute_everything), preserve_rng_state=False
    )
    with OperatorProbe(["acme"]) as probe:
        model(*tiny_inputs()).sum().backward()
    assert probe.counts == {"acme::scaled_gelu": 2, "acme::scaled_gelu_backward": 2}
