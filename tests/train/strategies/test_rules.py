"""What a strategy of one's own makes of gradients and means, on a few numbers."""

from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
from torch import nn

from workbench.plan.experiment.sync import OwnStrategy, Strategy, Synchronous
from workbench.plan.extension.user_object import OwnObjectError
from workbench.train.optimizer.rules import Rules, is_of_strategy, stored_as


class Speed(Strategy):
    """The gradient, half of the speed before, and how far the weight is from the one then."""

    remembers: ClassVar = {"speed": 0.25, "start": "weight"}

    def gradient(self, step, grad, weight, then, state):
        state["speed"].mul_(0.5).add_(grad)
        return state["speed"] + step * (weight - then) + weight - state["start"]


class Pull(Strategy):
    exchanges = "weights"
    every = 2
    remembers: ClassVar = {"slow": "weight"}

    def averaged(self, step, mean, state):
        state["slow"] = (state["slow"] + mean) / 2 + step
        return state["slow"]


@pytest.fixture
def parameters():
    return {
        "a": nn.Parameter(torch.tensor([1.0, 2.0])),
        "none": nn.Parameter(torch.empty(0)),
        "b": nn.Parameter(torch.tensor([4.0])),
    }


def rules(strategy, parameters):
    model = SimpleNamespace(trainable=lambda: parameters)
    return Rules.of(OwnStrategy(strategy), model)


def test_a_strategy_without_methods_has_no_rules(parameters):
    assert Rules.of(Synchronous(), SimpleNamespace(trainable=lambda: parameters)) is None
    assert rules(type("Plain", (Strategy,), {})(), parameters) is None


def test_gradients_are_put_in_the_place_of_those_given(parameters):
    found = rules(Speed(), parameters)
    gradients = {"a": torch.tensor([1.0, 3.0]), "none": torch.empty(0), "b": torch.tensor([8.0])}
    found.adjust(2, gradients)
    assert gradients["a"].tolist() == [1.125, 3.125]
    assert gradients["b"].tolist() == [8.125]
    found.adjust(2, gradients)
    assert gradients["b"].tolist() == [8.125 + 4.0625]


def test_a_gradient_may_be_of_the_weights_then(parameters):
    found = rules(Speed(), parameters)
    gradients = {"a": torch.zeros(2), "b": torch.zeros(1)}
    found.adjust(3, gradients, {"b": torch.tensor([2.0])})
    assert gradients["a"].tolist() == [0.125, 0.125]
    assert gradients["b"].tolist() == [0.125 + 3 * 2.0]


def test_states_begin_anew_with_the_weights_of_now(parameters):
    found = rules(Speed(), parameters)
    gradients = {"b": torch.tensor([8.0])}
    found.adjust(0, gradients)
    with torch.no_grad():
        parameters["b"].fill_(5.0)
    found.begin()
    states = {(state, name): each.tolist() for state, name, each in found.named()}
    assert states["strategy.speed", "b"] == [0.25]
    assert states["strategy.start", "b"] == [5.0]
    with torch.no_grad():
        parameters["b"].fill_(6.0)
    assert states["strategy.start", "b"] == [5.0]


def test_states_are_named_by_parameters_with_elements(parameters):
    found = rules(Speed(), parameters)
    assert [(state, name) for state, name, _ in found.named()] == [
        (state, name) for name in ("a", "b") for state in ("strategy.speed", "strategy.start")
    ]


def test_states_are_put_back(parameters):
    found = rules(Speed(), parameters)
    found.load(lambda state, name: torch.full_like(parameters[name], len(state + name)))
    assert [each.unique().tolist() for _, _, each in found.named()] == [[15.0], [15.0]] * 2


def test_means_are_corrected(parameters):
    found = rules(Pull(), parameters)
    with torch.no_grad():
        parameters["b"].fill_(8.0)
    found.correct(1)
    assert parameters["b"].tolist() == [7.0]
    assert parameters["a"].tolist() == [2.0, 3.0]
    assert {name: each.tolist() for _, name, each in found.named()}["b"] == [7.0]


class Moving(Strategy):
    def gradient(self, step, grad, weight, then, state):
        weight.add_(1.0)
        return grad


class Drifting(Strategy):
    exchanges = "weights"
    every = 2
    remembers: ClassVar = {"sum": 0.0}

    def gradient(self, step, grad, weight, then, state):
        state["sum"].add_(grad)
        return grad


@pytest.mark.parametrize(
    ("strategy", "text"),
    [
        (Moving(), "changed the weights of 'b', which the optimizer moves"),
        (Drifting(), "changed a state of 'b', and each rank has other gradients"),
    ],
)
def test_a_gradient_that_changes_what_it_may_not_is_refused(parameters, strategy, text):
    found = rules(strategy, parameters)
    with pytest.raises(OwnObjectError, match=text):
        found.adjust(0, {"b": torch.zeros(1)})


def test_a_state_of_a_strategy_is_known_by_its_name():
    assert stored_as("speed") == "strategy.speed"
    assert is_of_strategy("strategy.speed")
    assert not is_of_strategy("exp_avg")
