"""The calls that converted models make in a training step, bound to torch_npu's operators."""

import pickle
from collections import Counter
from dataclasses import replace

import pytest
import torch

from tests.op_norm_rope import models
from torchtitan_npu_core.apply import convert_model
from torchtitan_npu_core.loading import discover_and_load
from torchtitan_npu_core.operators import declared_specs
from torchtitan_npu_core.schemas import parse_schema
from torchtitan_npu_core.testing import CallRecorder, replay_on_meta
from torchtitan_npu_core.testing.checks import PromiseError

BOTH = ["npu_rms_norm", "npu_rope"]


def step(family):
    """The calls of one forward and backward on the device."""
    model = models.build(family)
    convert_model(model, BOTH)
    model = model.to("npu")
    with torch.device("npu"), CallRecorder() as recorder:
        models.run(model, family)
    return recorder.calls


def check_declared_calls(calls):
    """Releases are judged by the ``calls`` of declarations: converters make no others."""
    specs = declared_specs(discover_and_load())
    for call in calls:
        if call.operator not in specs or not specs[call.operator].calls:
            continue
        order = [a.name for a in parse_schema(specs[call.operator].schema).arguments]
        given = {*order[: len(call.args)], *call.kwargs}
        allowed = [set(form.replace("*", "").split(", ")) for form in specs[call.operator].calls]
        assert any(given <= names for names in allowed), call


def test_call_beyond_the_declared_ones_is_noticed(norm_call):
    rotary = replace(norm_call, operator="npu::npu_rotary_mul", args=(None,) * 5)
    with pytest.raises(AssertionError):
        check_declared_calls([rotary])
    check_declared_calls([replace(rotary, args=(None,) * 4)])


@pytest.mark.parametrize("family", ["llama3", "qwen3", "deepseek_v3"])
def test_calls_of_a_training_step_bind_to_torch_npu(family):
    calls = step(family)
    norms, attentions = models.NORMS[family], models.ATTENTIONS[family]
    rotations = models.ROTATIONS_PER_ATTENTION * attentions
    counts = Counter(call.operator for call in calls)
    assert counts["npu::npu_rms_norm"] == counts["npu::npu_rms_norm_backward"] == norms
    assert counts["npu::npu_rotary_mul"] == counts["npu::npu_rotary_mul_backward"] == rotations
    check_declared_calls(calls)
    # torch_npu's own calls in between are replayed too; and a recording survives a file
    assert replay_on_meta(pickle.loads(pickle.dumps(calls))) >= 4


@pytest.fixture(scope="module")
def norm_call():
    return next(c for c in step("llama3") if c.operator == "npu::npu_rms_norm")


def test_call_with_an_unknown_argument_is_refused(norm_call):
    wrong = replace(norm_call, kwargs={"eps": 1e-5})
    with pytest.raises(PromiseError, match=r"npu_rms_norm takes the recorded call .*eps"):
        replay_on_meta([norm_call, wrong])


def test_call_of_another_operator_is_refused(norm_call):
    with pytest.raises(PromiseError, match="npu_rms_norm_v9 takes the recorded call"):
        replay_on_meta([replace(norm_call, operator="npu::npu_rms_norm_v9")])


def test_outputs_that_torch_npu_would_not_give_are_refused(norm_call):
    y, rstd = norm_call.outputs
    for outputs in [(y,), (rstd, y), (replace(y, dtype=torch.bfloat16), rstd)]:
        with pytest.raises(PromiseError, match="describes the outputs"):
            replay_on_meta([replace(norm_call, outputs=outputs)])
