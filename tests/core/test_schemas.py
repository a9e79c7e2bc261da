import pytest

from torchtitan_npu_core.schemas import (
    Argument,
    fitting_versions,
    generation_of,
    generations,
    misfit,
    parse_schema,
)

ROTARY = (
    "npu_rotary_mul(Tensor input, Tensor r1, Tensor r2, str rotary_mode='half', "
    "Tensor? rotate=None) -> Tensor"
)
OLD_ROTARY = ROTARY.replace(", Tensor? rotate=None", "")


def test_parts_of_a_schema():
    schema = parse_schema(
        'npu::f.List(Tensor(a!)[] x, int[2] size=[1, 2], str mode="a, b", *, float eps=1e-06, '
        "Device? device=None) -> (Tensor y, Tensor[])"
    )
    assert schema.name == "f.List"
    assert schema.arguments == (
        Argument("x", "Tensor(a!)[]", None, False),
        Argument("size", "int[2]", "[1,2]", False),
        Argument("mode", "str", "'a, b'", False),
        Argument("eps", "float", "1e-06", True),
        Argument("device", "Device?", "None", True),
    )
    assert schema.returns == ("Tensor", "Tensor[]")


@pytest.mark.parametrize("text", ["", "f(Tensor x)", "f(Tensor) -> Tensor", "just words"])
def test_what_is_no_schema(text):
    with pytest.raises(ValueError, match=r"not an? "):
        parse_schema(text)


def test_releases_of_one_torch_version_belong_to_several_generations():
    names = [generation.name for generation in generations()]
    assert names == sorted(names)
    assert len(names) == 5
    found = {v: generation_of(v).name for v in ("2.7.1", "2.7.1.post4", "2.7.1.post8", "2.13.0")}
    assert found == {"2.7.1": "A", "2.7.1.post4": "C", "2.7.1.post8": "D", "2.13.0": "E"}
    assert generation_of("2.13.0+git1").name == "E"
    assert generation_of("1.0") is None


def test_every_shipped_schema_can_be_read():
    for generation in generations():
        assert len(generation.schemas) > 300
        for base, text in generation.schemas.items():
            assert parse_schema(text).name == base


@pytest.mark.parametrize(
    ("call", "live", "says"),
    [
        ("input, r1, r2, rotary_mode", OLD_ROTARY, None),
        ("input, r1, r2, rotary_mode", ROTARY, None),
        ("input, r1, r2, *, rotary_mode", OLD_ROTARY, None),
        ("", ROTARY.replace("'", '"'), None),
        ("", OLD_ROTARY, "argument 5 is nothing, the call gives rotate"),
        ("input, r1, r2, *, rotate", OLD_ROTARY, "no argument rotate"),
        ("input, r1, r2", ROTARY.replace("half", "interleave"), "rotary_mode defaults to"),
        ("input, r1, r2", ROTARY.replace("r1, Tensor r2", "r2, Tensor r1"), "argument 2 is r2"),
        ("input, r1", ROTARY, "argument r2 must be given"),
        ("", ROTARY.replace("Tensor? rotate", "Tensor rotate"), "the call gives Tensor?"),
        ("", ROTARY.replace("str rotary", "*, str rotary"), "argument 4 is rotary_mode"),
        ("", ROTARY.replace("-> Tensor", "-> (Tensor, Tensor)"), "it returns Tensor, Tensor"),
        ("", ROTARY.replace("=None)", "=None, int n=1)"), None),
        ("", ROTARY.replace("=None)", "=None, *, int n)"), "argument n must be given"),
        ("", None, "does not exist"),
    ],
)
def test_whether_a_call_fits(call, live, says):
    found = misfit(ROTARY, call, live)
    assert found is None if says is None else says in found


def test_equal_numbers_written_apart_are_equal():
    declared = "f(Tensor x, float eps=1e-06) -> Tensor"
    assert misfit(declared, "x", "f(Tensor x, float eps=9.9999999999999995e-07) -> Tensor") is None
    assert "defaults to" in misfit(declared, "x", "f(Tensor x, float eps=1e-05) -> Tensor")


def test_fitting_releases_are_in_order():
    every = fitting_versions("npu::npu_rotary_mul", ROTARY, ("input, r1, r2, rotary_mode",))
    newer = fitting_versions("npu::npu_rotary_mul", ROTARY, ())
    assert "2.7.1" in every
    assert "2.7.1" not in newer
    assert every.index("2.9.0") < every.index("2.9.0.post2") < every.index("2.10.0")
    assert set(newer) < set(every)
    assert fitting_versions("npu::none_such", "none_such(Tensor x) -> Tensor", ()) == []
