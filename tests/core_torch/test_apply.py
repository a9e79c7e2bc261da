"""Conversion engine on small models: plan, claims, all or nothing, idempotence, isolation."""

import copy

import pytest
import torch
from torch import nn

from torchtitan_npu_core import ConverterSpec
from torchtitan_npu_core.apply import apply_plan, convert_model
from torchtitan_npu_core.discovery import PluginRecord
from torchtitan_npu_core.errors import (
    ClaimConflictError,
    ConversionError,
    FactoryError,
    UnmatchedConverterError,
)
from torchtitan_npu_core.loading import discover_and_load
from torchtitan_npu_core.plan import Converter, Replacement, RootSetup, Skip, plan_conversion
from torchtitan_npu_core.registry import ConverterRegistry
from torchtitan_npu_core.swap import ReplacementMixin, replacement_class

PLUGIN = """
from torchtitan_npu_core import ConverterSpec, hookimpl

SEEN = []

def spec(name, factory):
    return ConverterSpec(name=name, summary="s", replaces=("torch.nn.Linear",), factory=factory)

@hookimpl
def torchtitan_npu_converters():
    return [spec("twice", "acme_impl:Twice"), spec("also", "acme_impl:Also"),
            spec("stub", "acme_impl:Stub"), spec("gone", "acme_impl:Missing"),
            spec("wrong", "acme_impl:NotAConverter"), spec("block", "acme_impl:Block"),
            spec("late", "acme_impl:FailsInSetup"),
            spec("half", "acme_impl:FailsInTheMiddle"), spec("looks", "acme_impl:FailsLooking")]

@hookimpl
def torchtitan_npu_before_conversion(plan):
    SEEN.append(("before", len(plan.rows)))

@hookimpl
def torchtitan_npu_after_conversion(plan, result):
    SEEN.append(("after", result.num_replaced))
    if len(plan.rows) == 1:
        raise RuntimeError("an observer that fails")
"""

IMPLEMENTATION = """
from torch import nn
from torchtitan_npu_core.plan import Converter, Replacement, RootSetup, Skip
from torchtitan_npu_core.swap import ReplacementMixin, replacement_class

class NotAConverter:
    pass

class Doubled(ReplacementMixin):
    torchtitan_npu_converter = "twice"
    def forward(self, x):
        return 2 * super().forward(x)

def before(model, args, kwargs):
    model.calls = getattr(model, "calls", 0) + 1

class Twice(Converter):
    def claim(self, fqn, module, model):
        if isinstance(module, nn.Linear):
            if module.bias is None:
                return Skip("it has no bias")
            return Replacement(cls=replacement_class(Doubled, type(module)))
    def setup(self, model, replaced):
        return RootSetup(attributes={"note": list(replaced)}, pre_hooks=(before,))

class Also(Twice):
    pass

class Stub(Converter):
    def claim(self, fqn, module, model):
        return None

class Whole(ReplacementMixin):
    torchtitan_npu_converter = "block"

class Block(Converter):
    def claim(self, fqn, module, model):
        if isinstance(module, nn.Sequential) and fqn:
            return Replacement(cls=replacement_class(Whole, type(module)), keeps_children=False)

class Unrelated(nn.Module):
    pass

class FailsInTheMiddle(Twice):
    def claim(self, fqn, module, model):
        claim = super().claim(fqn, module, model)
        if fqn == "last":
            return Replacement(cls=Unrelated, attributes={"half": 1})
        return claim

class Kept(ReplacementMixin):
    torchtitan_npu_converter = "late"

class FailsInSetup(Converter):
    def claim(self, fqn, module, model):
        if isinstance(module, nn.ReLU):
            return Replacement(cls=replacement_class(Kept, type(module)))
    def setup(self, model, replaced):
        raise RuntimeError("too late")

class FailsLooking(Converter):
    def claim(self, fqn, module, model):
        if isinstance(module, nn.Linear):
            raise KeyError("inside")
"""


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(2, 2)
        self.inner = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
        self.bare = nn.Linear(2, 2, bias=False)
        self.shared = self.first
        self.last = nn.Linear(2, 2)

    def forward(self, x):
        return self.last(self.bare(self.inner(self.shared(self.first(x)))))


@pytest.fixture
def plugins(fake_distribution):
    fake_distribution(
        "acme-engine",
        entry_points="[torchtitan_npu.converters]\nengine = acme_engine\n",
        modules={"acme_engine": PLUGIN, "acme_impl": IMPLEMENTATION},
    )
    return discover_and_load()


def plan_of(model, plugins, *names, allow=()):
    offers = ConverterRegistry(plugins).resolve(list(names))
    return plan_conversion(model, offers, allow_unmatched=frozenset(allow))


def classes(model):
    return {n: type(m) for n, m in model.named_modules()}


def state(model):
    return (classes(model), set(vars(model)), list(model._forward_pre_hooks.values()))


def test_plan_changes_nothing_and_names_every_module(plugins):
    model = Model()
    before = state(model)
    plan = plan_of(model, plugins, "twice")
    assert state(model) == before
    assert {r.fqn: r.state for r in plan.rows} == {
        "first": "replaced",
        "inner.0": "replaced",
        "bare": "skipped",
        "last": "replaced",
    }
    assert plan.untouched == ["", "inner", "inner.1"]
    assert plan.rows_of("twice", "skipped")[0].reason == "it has no bias"


def test_shared_module_is_converted_once_and_stays_shared(plugins):
    model = Model()
    row = next(r for r in plan_of(model, plugins, "twice").rows if r.fqn == "first")
    assert row.also == ("shared",)
    convert_model(model, ["twice"], plugins=plugins)
    assert model.first is model.shared
    y = model.first.weight.detach().sum()
    assert torch.allclose(model.first(torch.ones(2)).sum(), 2 * (y + model.first.bias.sum()))


def test_result_counts_instances(plugins):
    result = convert_model(Model(), ["twice"], plugins=plugins)
    assert result.replaced == {"twice": ["first", "inner.0", "last"]}
    assert result.skipped == {"twice": [("bare", "it has no bias")]}
    assert result.num_replaced == 3


def test_parameters_hooks_flags_and_optimizer_survive(plugins):
    torch.manual_seed(0)
    model = Model()
    model.first.weight.requires_grad_(False)
    model.inner.eval()
    seen = []
    model.last.register_forward_hook(lambda *a: seen.append(1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = {n: (id(p), p.data_ptr(), p.requires_grad) for n, p in model.named_parameters()}
    keys = list(model.state_dict())
    convert_model(model, ["twice"], plugins=plugins)
    assert {
        n: (id(p), p.data_ptr(), p.requires_grad) for n, p in model.named_parameters()
    } == before
    assert list(model.state_dict()) == keys
    assert not model.inner[0].training
    old = model.last.weight.detach().clone()
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    assert seen == [1]
    assert not torch.equal(old, model.last.weight)


def test_another_model_is_untouched(plugins):
    torch.manual_seed(0)
    other = Model()
    before, y = state(other), other(torch.ones(2))
    convert_model(Model(), ["twice"], plugins=plugins)
    assert state(other) == before
    assert torch.equal(other(torch.ones(2)), y)
    assert type(Model().first) is nn.Linear


def test_failure_in_the_middle_leaves_the_model_as_it_was(plugins):
    model = Model()
    before = state(model)
    with pytest.raises(ConversionError) as caught:
        convert_model(model, ["half"], plugins=plugins)
    assert caught.value.fqn == "last"
    assert "does not derive" in caught.value.reason
    assert state(model) == before
    assert "half" not in vars(model.last)


def test_failure_of_a_later_converter_takes_back_the_earlier_ones(plugins):
    class Later(nn.ReLU):
        pass

    model = nn.Sequential(nn.Linear(2, 2), Later())
    before = state(model)
    with pytest.raises(ConversionError, match="left unchanged"):
        convert_model(model, ["twice", "late"], plugins=plugins)
    assert state(model) == before


def test_failure_while_looking_names_the_module(plugins):
    with pytest.raises(ConversionError, match=r"'first'.*KeyError"):
        convert_model(Model(), ["looks"], plugins=plugins)


def test_converting_twice_equals_converting_once(plugins):
    model = Model()
    convert_model(model, ["twice"], plugins=plugins)
    once = state(model)
    result = convert_model(model, ["twice"], plugins=plugins)
    assert state(model) == once
    assert result.kept == {"twice": ["first", "inner.0", "last"]}
    model(torch.ones(2))
    assert model.calls == 1


def test_other_options_on_a_converted_model_are_refused(plugins):
    model = Model()
    convert_model(model, ["twice"], plugins=plugins)
    model._torchtitan_npu_options["twice"] = {"factor": 3}
    with pytest.raises(ConversionError, match="converted before with options"):
        convert_model(model, ["twice"], plugins=plugins)


def test_constructor_that_fails_names_converter_and_distribution(plugins, monkeypatch):
    import acme_impl

    monkeypatch.setattr(acme_impl.Twice, "__init__", lambda self, options: 1 / 0)
    with pytest.raises(ConversionError, match=r"'twice'.*ZeroDivisionError.*acme-engine 1\.0"):
        convert_model(Model(), ["twice"], plugins=plugins)


def test_two_converters_on_one_module_are_an_error_naming_both(plugins):
    model = Model()
    before = state(model)
    with pytest.raises(ClaimConflictError, match="'twice' and 'also' both claim first"):
        convert_model(model, ["twice", "also"], plugins=plugins)
    assert state(model) == before


def test_claim_below_a_module_that_drops_its_children_is_an_error(plugins):
    for names in (["block", "twice"], ["twice", "block"]):
        with pytest.raises(ClaimConflictError, match=r"inner\.0, which is inside inner"):
            convert_model(Model(), names, plugins=plugins)


def test_zero_matches_is_an_error_unless_allowed(plugins):
    with pytest.raises(UnmatchedConverterError, match=r"searched 7 modules"):
        convert_model(Model(), ["stub"], plugins=plugins)
    convert_model(Model(), ["stub"], plugins=plugins, section={"allow_unmatched": ["stub"]})


def test_zero_matches_lists_what_was_refused(plugins):
    with pytest.raises(UnmatchedConverterError, match="it has no bias"):
        convert_model(nn.Sequential(nn.Linear(2, 2, bias=False)), ["twice"], plugins=plugins)


@pytest.mark.parametrize(("name", "says"), [("gone", "Missing"), ("wrong", "subclass")])
def test_factory_that_cannot_be_used_names_converter_and_owner(plugins, name, says):
    with pytest.raises(FactoryError, match=f"acme-engine 1.0.*{says}"):
        convert_model(Model(), [name], plugins=plugins)


def test_observers_are_told_and_cannot_stop_a_run(plugins, caplog):
    record = next(r for r in plugins.records if r.name == "engine")
    convert_model(nn.Sequential(nn.Linear(2, 2)), ["twice"], plugins=plugins)
    assert record.module.SEEN == [("before", 1), ("after", 1)]
    assert "an observer that fails" in caplog.text
    assert "acme-engine 1.0" in caplog.text


def test_works_on_meta_and_after_materialising(plugins):
    with torch.device("meta"):
        model = Model()
    convert_model(model, ["twice"], plugins=plugins)
    assert all(p.is_meta for p in model.parameters())
    model.to_empty(device="cpu")
    for p in model.parameters():
        nn.init.ones_(p)
    stock = Model()
    stock.load_state_dict(model.state_dict())
    assert model(torch.ones(2)).shape == stock(torch.ones(2)).shape


def test_module_or_parameter_as_attribute_is_refused(plugins):
    class Bad(Converter):
        def claim(self, fqn, module, model):
            if isinstance(module, nn.Linear):
                return Replacement(
                    cls=replacement_class(Nothing, type(module)),
                    attributes={"x": nn.Parameter(torch.ones(1))},
                )
            return None

    class Nothing(ReplacementMixin):
        torchtitan_npu_converter = "twice"

    model = nn.Sequential(nn.Linear(2, 2))
    offers = ConverterRegistry(plugins).resolve(["twice"])
    plan = plan_conversion(model, offers)
    bad = Bad({})
    plan.converters = {"twice": bad}
    for i, row in enumerate(plan.rows):
        claim = bad.claim(row.fqn, model[0], model)
        plan.rows[i] = type(row)(
            converter="twice", fqn=row.fqn, state="replaced", module_class="", replacement=claim
        )
    with pytest.raises(ConversionError, match="plain object"):
        apply_plan(model, plan, plugins)
    assert type(model[0]) is nn.Linear


def test_deepcopy_of_a_converted_model_is_converted(plugins):
    model = Model()
    convert_model(model, ["twice"], plugins=plugins)
    other = copy.deepcopy(model)
    x = torch.ones(2)
    assert torch.equal(other(x), model(x))
    assert classes(other) == classes(model)
    assert other.calls == 1


def test_types_used_by_plugins_are_importable():
    assert all((PluginRecord, ConverterSpec, RootSetup, Skip))
