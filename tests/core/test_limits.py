import warnings

import pytest

from torchtitan_npu_core import limits
from torchtitan_npu_core.errors import DeviceLimitError, OptionValueError
from torchtitan_npu_core.specs import DeviceLimit, OperatorSpec

SPEC = OperatorSpec(
    name="x::y",
    schema="y(Tensor a) -> Tensor",
    kernels="m:K",
    limits=(
        DeviceLimit(quantity="heads", families=("a2", "a3"), choices=(32, 64), reason="why"),
        DeviceLimit(quantity="dim", families=("950",), maximum=8, minimum=2, multiple_of=2),
    ),
)


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    limits._warn_once.cache_clear()
    monkeypatch.delenv("TORCHTITAN_NPU_TARGET_DEVICE", raising=False)


def test_limit_is_an_error_when_the_family_is_targeted():
    with limits.targeting("a3"), pytest.raises(DeviceLimitError) as caught:
        limits.enforce_limits(SPEC, {"heads": 16})
    assert "heads is 16, must be one of 32, 64 (why)" in str(caught.value)
    assert caught.value.family == "a3"


def test_limit_of_another_family_does_not_matter():
    with limits.targeting("950"):
        limits.enforce_limits(SPEC, {"heads": 16, "dim": 4})


@pytest.mark.parametrize("dim", [10, 1, 3])
def test_every_kind_of_bound(dim):
    with limits.targeting("950"), pytest.raises(DeviceLimitError, match="dim is"):
        limits.enforce_limits(SPEC, {"dim": dim})


def test_limit_warns_once_without_target():
    with pytest.warns(UserWarning, match="would be refused on device family a2/a3"):
        limits.enforce_limits(SPEC, {"heads": 16})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        limits.enforce_limits(SPEC, {"heads": 16})


def test_variable_sets_the_target(monkeypatch):
    monkeypatch.setenv("TORCHTITAN_NPU_TARGET_DEVICE", "a2")
    with pytest.raises(DeviceLimitError):
        limits.enforce_limits(SPEC, {"heads": 16})


def test_variable_that_names_no_family_is_refused(monkeypatch):
    monkeypatch.setenv("TORCHTITAN_NPU_TARGET_DEVICE", "a4")
    with pytest.raises(OptionValueError, match=r"'a4'.*'a2', 'a3', '950'"):
        limits.target_device()


def test_unknown_family_is_refused():
    with pytest.raises(ValueError, match="h100"), limits.targeting("h100"):
        pass


@pytest.mark.parametrize(
    ("name", "family"),
    [("Ascend910B1", "a2"), ("Ascend910_9392", "a3"), ("Ascend950PR", "950"), ("H100", "")],
)
def test_family_is_read_from_the_product_name(name, family):
    assert limits.family_of(name) == family
