import types

import pytest

from torchtitan_npu_core.discovery import PluginRecord
from torchtitan_npu_core.errors import (
    ConverterListError,
    DuplicateConverterError,
    OptionValueError,
    UnknownConverterError,
    UnknownOptionError,
)
from torchtitan_npu_core.loading import PluginSet, new_manager
from torchtitan_npu_core.registry import ConverterRegistry
from torchtitan_npu_core.specs import ConverterSpec, OptionSpec


def spec(name, **kwargs):
    return ConverterSpec(name=name, summary="s", replaces=("x",), factory="m:C", **kwargs)


def registry(*specs, more=()):
    def plugin(name, converters):
        return PluginRecord(
            name=name,
            value=name,
            distribution=f"dist-{name}",
            version="1",
            location="",
            state="loaded",
            converters=tuple(converters),
            module=types.ModuleType(name),
        )

    records = [plugin("p", specs), *([plugin("q", more)] if more else [])]
    return ConverterRegistry(PluginSet(records, new_manager()))


def names(offers):
    return [o.spec.name for o in offers]


def test_unknown_converter_suggests_close_names():
    with pytest.raises(UnknownConverterError) as caught:
        registry(spec("npu_rms_norm"), spec("npu_rope")).get("npu_rms_nrom")
    assert "Did you mean 'npu_rms_norm'" in str(caught.value)
    assert caught.value.known == ["npu_rms_norm", "npu_rope"]


def test_unknown_converter_of_ours_names_the_distribution_to_install():
    with pytest.raises(UnknownConverterError, match="pip install torchtitan-npu-op-dsa"):
        registry().get("npu_dsa")


def test_name_from_two_distributions_is_an_error_naming_both():
    with pytest.raises(DuplicateConverterError) as caught:
        registry(spec("a"), more=[spec("a")]).get("a")
    assert caught.value.distributions == ("dist-p 1", "dist-q 1")
    assert "TORCHTITAN_NPU_DISABLE_PLUGINS=dist-p" in str(caught.value)


def test_alias_selects_the_converter():
    assert names(registry(spec("new", aliases=("old",))).resolve(["old"])) == ["new"]


def test_order_is_the_users():
    assert names(registry(spec("a"), spec("b")).resolve(["b", "a"])) == ["b", "a"]


@pytest.mark.parametrize("text", ["a,b", "a", ""])
def test_text_in_place_of_a_list_is_refused(text):
    with pytest.raises(ConverterListError, match="must be a list"):
        registry(spec("a"), spec("b")).resolve(text)


@pytest.mark.parametrize(
    ("specs", "given", "corrected"),
    [
        ([spec("a"), spec("b")], ["a", "b", "a"], ["a", "b"]),
        ([spec("a", aliases=("z",))], ["a", "z"], ["a"]),
        ([spec("a"), spec("b", requires=("a",))], ["b"], ["a", "b"]),
        ([spec("a"), spec("b", requires=("a",))], ["b", "a"], ["a", "b"]),
        ([spec("a"), spec("b", after=("a",))], ["b", "a"], ["a", "b"]),
        ([spec("a"), spec("b", conflicts=("a",))], ["a", "b"], ["b"]),
        ([spec("a")], ["a", ""], ["a"]),
    ],
    ids=["repeat", "repeat-alias", "requires", "requires-order", "after", "conflict", "empty"],
)
def test_lists_that_cannot_work_are_refused_with_the_corrected_list(specs, given, corrected):
    made = registry(*specs)
    with pytest.raises(ConverterListError) as caught:
        made.resolve(given)
    assert caught.value.corrected == corrected
    assert 'converters = ["' in str(caught.value)
    made.resolve(corrected)


@pytest.mark.parametrize("given", [3, True, [1], [["a"]], [{"a": 1}], None])
def test_anything_but_a_list_of_names_is_refused(given):
    with pytest.raises(ConverterListError, match="list of names"):
        registry(spec("a")).resolve(given)


def test_after_does_not_require_the_other():
    assert names(registry(spec("a"), spec("b", after=("a",))).resolve(["b"])) == ["b"]


def test_requirement_that_is_not_installed_is_unknown():
    with pytest.raises(UnknownConverterError):
        registry(spec("b", requires=("a",))).resolve(["b"])


OPTIONS = (
    OptionSpec(name="fast", default=False, summary="s"),
    OptionSpec(name="level", default=1, summary="s", choices=(1, 2)),
)


def test_defaults_fill_in():
    settings = registry(spec("a", options=OPTIONS)).settings({})
    assert settings.options == {"a": {"fast": False, "level": 1}}
    assert settings.allow_unmatched == frozenset()


def test_section_values_are_read():
    settings = registry(spec("a", options=OPTIONS)).settings(
        {"a": {"level": 2}, "allow_unmatched": ["a"], "target": "a3", "strict": True}
    )
    assert settings.options["a"]["level"] == 2
    assert settings.target == "a3"
    assert settings.strict is True
    assert settings.allow_unmatched == {"a"}


def test_whole_number_is_fine_where_a_number_is_wanted():
    made = registry(spec("a", options=(OptionSpec(name="scale", default=1.0, summary="s"),)))
    assert made.settings({"a": {"scale": 2}}).options["a"]["scale"] == 2.0
    with pytest.raises(OptionValueError):
        made.settings({"a": {"scale": True}})


@pytest.mark.parametrize(
    ("section", "suggests"),
    [({"alow_unmatched": []}, "allow_unmatched"), ({"a": {"fats": True}}, "fast")],
)
def test_unknown_option_suggests_the_right_one(section, suggests):
    with pytest.raises(UnknownOptionError, match=f"Did you mean '{suggests}'"):
        registry(spec("a", options=OPTIONS)).settings(section)


def test_unmatched_name_that_is_no_converter_is_refused_with_a_suggestion():
    with pytest.raises(OptionValueError, match="Did you mean 'npu_rope'"):
        registry(spec("npu_rope")).settings({"allow_unmatched": ["npu_rop"]})


@pytest.mark.parametrize(
    "section",
    [
        {"a": {"fast": "yes"}},
        {"a": {"fast": 1}},
        {"a": {"level": True}},
        {"a": {"level": 3}},
        {"a": 3},
        {"allow_unmatched": "a"},
        {"strict": "no"},
        {"target": "h100"},
    ],
)
def test_wrong_values_are_refused(section):
    with pytest.raises(OptionValueError):
        registry(spec("a", options=OPTIONS)).settings(section)
