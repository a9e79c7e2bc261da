import sys

import pytest

from torchtitan_npu_core.errors import PluginError, UnknownConverterError
from torchtitan_npu_core.loading import discover_and_load, report_problems
from torchtitan_npu_core.registry import ConverterRegistry

GOOD = """
from torchtitan_npu_core import ConverterSpec, hookimpl

@hookimpl
def torchtitan_npu_converters():
    return [ConverterSpec(name="{name}", summary="s", replaces=("x",), factory="m:C")]
"""


def entry(name, module):
    return f"[torchtitan_npu.converters]\n{name} = {module}\n"


@pytest.fixture
def good(fake_distribution):
    fake_distribution(
        "acme-good",
        entry_points=entry("good", "acme_good"),
        modules={"acme_good": GOOD.format(name="good_norm")},
    )


def record(name):
    return next(r for r in discover_and_load().records if r.name == name)


@pytest.fixture
def broken(fake_distribution):
    fake_distribution(
        "acme-bad",
        entry_points=entry("bad", "acme_bad"),
        modules={"acme_bad": "import does_not_exist"},
    )


def test_broken_plugin_does_not_hide_a_working_one(good, broken):
    plugins = discover_and_load()
    records = {r.name: r for r in plugins.records}
    assert records["good"].state == "loaded"
    assert records["bad"].state == "broken"
    assert "acme-bad 1.0" in records["bad"].problem
    assert "does_not_exist" in records["bad"].message
    assert "acme_bad.py:1" in records["bad"].message
    assert "Traceback" in records["bad"].traceback
    assert ConverterRegistry(plugins).get("good_norm").spec.name == "good_norm"


def test_broken_plugin_gives_one_warning_with_distribution_entry_point_and_reason(
    good, broken, caplog
):
    report_problems(discover_and_load())
    mine = [r.getMessage() for r in caplog.records if "acme-bad" in r.getMessage()]
    assert len(mine) == 1
    assert "'bad'" in mine[0]
    assert "does_not_exist" in mine[0]


def test_strict_variable_turns_the_warning_into_an_error(good, broken, monkeypatch):
    monkeypatch.setenv("TORCHTITAN_NPU_STRICT_PLUGINS", "1")
    with pytest.raises(PluginError, match="acme-bad"):
        report_problems(discover_and_load())


def test_strict_argument_overrides_the_variable(broken, monkeypatch):
    monkeypatch.setenv("TORCHTITAN_NPU_STRICT_PLUGINS", "1")
    report_problems(discover_and_load(), strict=False)


def test_unknown_name_lists_the_broken_plugin_and_why(good, broken):
    with pytest.raises(UnknownConverterError) as caught:
        ConverterRegistry(discover_and_load()).get("bad_norm")
    text = str(caught.value)
    assert "good_norm" in text
    assert "acme-bad 1.0" in text
    assert "does_not_exist" in text


@pytest.mark.parametrize(
    ("source", "says"),
    [
        (GOOD.format(name="n").replace('name="n"', "name=3"), "name must be a string"),
        (GOOD.format(name="n").replace('"m:C"', '"m:C", options=({"a": 1},)'), "OptionSpec"),
        (GOOD.format(name="n").replace('"m:C"', '"m:C", aliases="abc"'), "aliases must be"),
        (GOOD.format(name="target"), "[npu] section"),
        (GOOD.format(name="n").replace('"m:C"', "None"), "module:Class"),
        ("raise SystemExit(3)", "SystemExit"),
        ("x = 1", "no hook"),
        ("def torchtitan_npu_converters():\n    return []", "no @hookimpl"),
        (GOOD.format(name="n").replace("npu_converters", "npu_convertors"), "did you mean"),
        (GOOD.format(name="n").replace("converters()", "converters(model)"), "model"),
        (GOOD.format(name="n").replace("return [", "return [3, "), "int"),
        (GOOD.format(name="n").replace("return [", "return 3 #"), "list of ConverterSpec"),
        (
            GOOD.format(name="n").replace('factory="m:C"', 'factory="m:C", aliases=("n",)'),
            "more than once",
        ),
    ],
    ids=[
        "name-3",
        "option-dict",
        "alias-text",
        "reserved",
        "no-factory",
        "exits",
        "no-hooks",
        "unmarked",
        "misspelt",
        "bad-signature",
        "bad-item",
        "bad-return",
        "repeats",
    ],
)
def test_each_kind_of_fault_makes_the_plugin_broken(fake_distribution, source, says):
    fake_distribution(
        "acme-odd", entry_points=entry("odd", "acme_odd"), modules={"acme_odd": source}
    )
    found = record("odd")
    assert found.state == "broken"
    assert says in found.message
    assert found.converters == ()


def test_missing_module_is_broken(fake_distribution):
    fake_distribution("acme-gone", entry_points=entry("gone", "acme_gone.plugin"))
    assert record("gone").state == "broken"


@pytest.mark.parametrize(
    "requirement", ["torchtitan-npu-core>=99", 'packaging<1; extra == "targets"']
)
def test_requirement_out_of_range_is_incompatible_and_not_imported(fake_distribution, requirement):
    fake_distribution(
        "acme-old",
        entry_points=entry("old", "acme_old"),
        modules={"acme_old": "raise RuntimeError('imported')"},
        requires=[requirement],
    )
    found = record("old")
    assert found.state == "incompatible"
    assert "found" in found.message
    assert "pip install --upgrade acme-old" in found.message
    assert "acme_old" not in sys.modules


def test_requirement_on_something_not_installed_is_no_obstacle(fake_distribution):
    fake_distribution(
        "acme-good",
        entry_points=entry("good", "acme_good"),
        modules={"acme_good": GOOD.format(name="good_norm")},
        requires=['not-installed-anywhere>=3; extra == "targets"'],
    )
    assert record("good").state == "loaded"


def test_unreadable_requirement_is_incompatible(fake_distribution):
    fake_distribution(
        "acme-odd", entry_points=entry("odd", "acme_odd"), requires=["what ever >= is"]
    )
    assert record("odd").state == "incompatible"


def test_unknown_hook_marked_optional_is_accepted(fake_distribution):
    source = GOOD.format(name="n") + (
        "\n@hookimpl(optionalhook=True)\ndef torchtitan_npu_of_the_future():\n    return 1\n"
    )
    fake_distribution(
        "acme-new", entry_points=entry("new", "acme_new"), modules={"acme_new": source}
    )
    assert record("new").state == "loaded"


def test_plugin_found_twice_is_called_once(fake_distribution):
    source = (
        GOOD.format(name="once_norm")
        .replace(
            "def torchtitan",
            "CALLS = []\n@hookimpl\ndef torchtitan_npu_operators():\n"
            "    CALLS.append(1)\n    return []\n\n@hookimpl\ndef torchtitan",
        )
        .replace("@hookimpl\nCALLS", "CALLS")
    )
    for site, layout in (("a", "dist-info"), ("b", "egg-info")):
        fake_distribution(
            "acme-once",
            site=site,
            layout=layout,
            entry_points=entry("once", "acme_once"),
            modules={"acme_once": source},
        )
    plugins = discover_and_load()
    records = [r for r in plugins.records if r.name == "once"]
    assert [r.state for r in records] == ["loaded"]
    plugins.call(records[0], "torchtitan_npu_operators")
    assert records[0].module.CALLS == [1]


def test_digest_tells_plugin_sets_apart(good, fake_distribution):
    one = discover_and_load()
    assert one.digest == discover_and_load().digest
    fake_distribution(
        "acme-more",
        entry_points=entry("more", "acme_more"),
        modules={"acme_more": GOOD.format(name="more_norm")},
    )
    assert one.digest != discover_and_load().digest
