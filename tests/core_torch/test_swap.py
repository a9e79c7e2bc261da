import copy
import pickle

import pytest
import torch
from torch import nn

from torchtitan_npu_core.swap import (
    ReplacementMixin,
    rebind_globals,
    replaced_from,
    replacement_class,
)

FACTOR = 2.0


def scale(x):
    return x * FACTOR


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x, *, extra=1.0):
        return scale(x) * self.weight * extra


def triple(x):
    return x * 3.0


class Tripled(ReplacementMixin):
    torchtitan_npu_converter = "tripled"

    @classmethod
    def specialize(cls, original):
        return {"forward": rebind_globals(original.forward, {"scale": triple})}


def converted():
    module = Scaled()
    module.__class__ = replacement_class(Tripled, Scaled)
    return module


def test_only_the_swapped_instance_changes():
    stock, module = Scaled(), converted()
    x = torch.ones(3)
    assert torch.equal(module(x), 3 * x)
    assert torch.equal(stock(x), 2 * x)
    assert torch.equal(module(x, extra=2.0), 6 * x)
    assert scale(1.0) == 2.0


def test_the_same_pair_gives_the_same_class():
    assert type(converted()) is type(converted())
    assert type(converted()).__name__ == "NPUScaled"
    assert isinstance(converted(), Scaled)


def test_replaced_from_names_converter_and_original():
    assert replaced_from(converted()) == ("tripled", Scaled)
    assert replaced_from(Scaled()) is None


@pytest.mark.parametrize("make", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_and_pickles(make):
    module = converted()
    module.weight.data.fill_(5)
    other = make(module)
    assert type(other) is type(module)
    assert torch.equal(other(torch.ones(3)), torch.full((3,), 15.0))
    assert other.weight is not module.weight


def test_class_derived_from_ours_copies_too():
    # FSDP swaps in a class of its own on top
    module = converted()
    module.__class__ = type("FSDPScaled", (type(module),), {})
    assert torch.equal(copy.deepcopy(module)(torch.ones(3)), torch.full((3,), 3.0))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiles_without_graph_break_and_keeps_apart(backend):
    torch._dynamo.reset()
    stock, module = Scaled(), converted()
    x = torch.ones(3)
    both = [torch.compile(m, backend=backend, fullgraph=True) for m in (stock, module)]
    assert torch.equal(both[0](x), 2 * x)
    assert torch.equal(both[1](x), 3 * x)
    with torch._dynamo.config.patch(error_on_recompile=True):
        assert torch.equal(both[0](x), 2 * x)
        assert torch.equal(both[1](x), 3 * x)


def test_rebinding_a_name_the_code_does_not_use_is_refused():
    with pytest.raises(ValueError, match="does not use"):
        rebind_globals(Scaled.forward, {"missing": triple})


def test_rebinding_something_that_is_no_function_is_refused():
    with pytest.raises(TypeError):
        rebind_globals(len, {"x": 1})
