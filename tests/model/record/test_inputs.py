"""Models that read several inputs, by the names of forward's parameters."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.layers.several import Joined, Masked, Placed
from workbench.model.errors import ModelError, TraceError
from workbench.model.tracing.trace import skeleton, trace
from workbench.plan.graph.graph import Input


def test_each_input_is_read_under_its_name():
    graph = trace(Joined(), inputs={"image": (6,), "meta": Input((4,))})
    assert graph.inputs == (Input((6,), name="image"), Input((4,), name="meta"))
    assert graph.consumers["input.image"] == ("a",)
    assert graph.consumers["input.meta"] == ("b",)


def test_the_skeleton_takes_inputs_as_they_were_declared():
    graph = trace(Joined(), inputs={"meta": (4,), "image": (6,)})
    read = [node for node in skeleton(graph).graph.nodes if node.op == "placeholder"]
    assert [node.target for node in read] == ["meta", "image"]


def test_a_parameter_that_is_not_declared_has_its_default():
    graph = trace(Masked(fused=False), inputs={"ids": Input((5,), vocabulary=7)})
    assert "masked_fill" not in [layer.name for layer in graph.layers]
    assert trace(Masked(fused=False), input_shape=(5,), vocabulary=7).layers == graph.layers


def test_a_named_input_may_be_any_parameter():
    class Second(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 2)

        def forward(self, tokens=None, embedded=None):
            return self.fc(embedded if tokens is None else tokens)

    graph = trace(Second(), inputs={"embedded": (4,)})
    assert [layer.inputs for layer in graph.layers] == [("input",)]


def test_masks_are_tried_with_something_left_in_each_line():
    for fused in (False, True):
        graph = trace(Masked(fused=fused), inputs=Masked.INPUTS)
        assert graph.scores_tokens


def test_a_number_for_each_sample_is_an_input():
    graph = trace(Placed(), inputs=Placed.INPUTS)
    assert graph.inputs[2] == Input((), name="scale")


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"image": (6,)}, "parameter 'meta' has no default and is for none of the inputs"),
        ({"image": (6,), "meta": (4,), "mask": (4,)}, "has no parameter 'mask'"),
        (None, "forward takes 2 inputs"),
    ],
)
def test_inputs_that_are_not_forwards(given, says):
    with pytest.raises(TraceError, match=says):
        trace(Joined(), inputs=given, input_shape=(6,))


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (dict(inputs={}), "gives an Input for each"),
        (dict(inputs=[(6,), (4,)]), "gives an Input for each"),
        (dict(inputs={"image": 6, "meta": (4,)}), "not iterable"),
        (dict(inputs={"an image": (6,)}), "named as forward's parameters"),
        (dict(inputs={"image": (6,)}, vocabulary=3), "an Input's own"),
        (dict(input_shape=()), "one sample's shape"),
    ],
)
def test_what_declares_no_inputs(given, says):
    with pytest.raises(ModelError, match=says):
        trace(Joined(), **given)


def test_named_models_have_their_own():
    with pytest.raises(ModelError, match="for modules of your own"):
        trace("vgg11", inputs={"x": (3, 32, 32)})


class Two(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.how, self.fc = how, nn.Linear(4, 3)

    def forward(self, x, y):
        return self.how(self.fc(x), y)


def test_a_second_input_may_not_mix_samples():
    with pytest.raises(TraceError, match="mixes samples"):
        trace(Two(lambda x, y: x + y.roll(1, 0)), inputs={"x": (4,), "y": (3,)})


def test_a_mask_may_not_mix_samples():
    two = Two(lambda x, y: x * y.roll(1, 0))
    with pytest.raises(TraceError, match="mixes samples"):
        trace(two, inputs={"x": (4,), "y": Input((3,), "bool")})


def test_an_input_that_nothing_depends_on_is_refused():
    with pytest.raises(TraceError, match="nothing that is returned depends on 'y'"):
        trace(Two(lambda x, y: x), inputs={"x": (4,), "y": (3,)})


def test_an_input_may_serve_training_alone():
    class Noisy(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 3)

        def forward(self, x, noise):
            return F.relu(self.fc(x + noise if self.training else x))

    graph = trace(Noisy(), inputs={"x": (4,), "noise": (4,)})
    assert graph.consumers["input.noise"] == ("add",)
    assert graph.evaluation.consumers["input.noise"] == ()


def test_a_module_may_not_have_the_name_of_an_input():
    class Clash(nn.Module):
        def __init__(self):
            super().__init__()
            self.input = nn.ModuleDict({"x": nn.Linear(4, 3)})

        def forward(self, x, y):
            return self.input["x"](x) + y

    with pytest.raises(TraceError, match=r"module 'input\.x' has the name"):
        trace(Clash(), inputs={"x": (4,), "y": (3,)})


def test_numbers_beyond_a_table_are_seen():
    class Tables(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Embedding(7, 4), nn.Embedding(5, 4)

        def forward(self, ids, positions):
            return self.a(ids) + self.b(positions)

    inputs = {"ids": Input((5,), vocabulary=7), "positions": Input((5,), vocabulary=5)}
    assert trace(Tables(), inputs=inputs).num_classes == 4
    with pytest.raises(TraceError):
        trace(Tables(), inputs=inputs | {"positions": Input((5,), vocabulary=6)})


def test_tracing_leaves_values_as_they_were():
    module = Joined()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    trace(module, inputs=Joined.INPUTS)
    for name, value in module.state_dict().items():
        assert torch.equal(value, before[name])
