"""What strategies have in common: updates that leave nothing behind, and first steps of others."""

from types import SimpleNamespace

import torch

from workbench.train.step.state import ImmediateStrategy
from workbench.train.strategy.strategy import WarmupStrategy


def test_of_immediate_updates_nothing_waits_or_travels():
    program = object()
    updates = ImmediateStrategy(program)
    assert updates.program(0) is updates.program(7) is program
    assert updates.expecting(["a"], []) is None
    assert updates.is_settled is True
    assert (updates.in_flight, updates.residuals) == ([], [])
    assert updates.scaling is None
    updates.settle()
    updates.rest()


class Steps:
    """Updates of a strategy that stand for its own: they say who was asked for what."""

    def __init__(self, name, said, residuals):
        self.name, self.said, self.residuals = name, said, residuals
        self.is_settled = self.in_flight = self.buffers = self.scaling = f"of {name}"

    def program(self, step):
        return f"{self.name} {step}"

    def bound(self, instruction):
        return f"{self.name} at {instruction}"

    def reducing(self, buckets):
        return f"{self.name} sums {buckets}"

    def expecting(self, names, buckets):
        return f"{self.name} expects {names} in {buckets}"

    def settle(self):
        self.said.append(f"{self.name} settles")

    def rest(self):
        self.said.append(f"{self.name} rests")

    def close(self):
        self.said.append(f"{self.name} closes")


def warming(until=2, *, with_rules=True):
    said = []
    left_out = [{"a": torch.tensor([1.0, 2.0])}, {"a": torch.tensor([9.0])}]
    warm = Steps("warm", said, left_out)
    own = Steps("own", said, [{"a": torch.zeros(2), "b": torch.ones(1)}])
    rules = SimpleNamespace(begin=lambda: said.append("rules begin")) if with_rules else None

    def then():
        said.append("own begins")
        return own

    return WarmupStrategy(warm, until, then, rules), own, said


def asked(updates):
    """Everything that is asked of updates, but programs."""
    updates.settle()
    updates.rest()
    return {
        updates.bound("here").split()[0],
        updates.reducing([]).split()[0],
        updates.expecting([], []).split()[0],
        *(
            each.removeprefix("of ")
            for each in (updates.is_settled, updates.in_flight, updates.buffers, updates.scaling)
        ),
    }


def test_first_steps_are_those_of_others():
    updates, _, said = warming()
    assert [updates.program(step) for step in (0, 1)] == ["warm 0", "warm 1"]
    assert asked(updates) == {"warm"}
    assert said == ["warm settles", "warm rests"]
    assert len(updates.residuals) == 2


def test_later_steps_are_its_own():
    updates, own, said = warming()
    assert [updates.program(step) for step in (1, 2, 3)] == ["warm 1", "own 2", "own 3"]
    assert said == ["warm closes", "own begins", "rules begin"]
    assert asked(updates) == {"own"}
    assert said[3:] == ["own settles", "own rests"]
    assert updates.residuals is own.residuals


def test_what_a_codec_has_left_out_is_not_forgotten():
    updates, own, _ = warming()
    updates.program(2)
    assert own.residuals[0]["a"].tolist() == [1.0, 2.0]
    assert own.residuals[0]["b"].tolist() == [1.0]


def test_what_has_no_rules_begins_without():
    updates, _, said = warming(with_rules=False)
    updates.program(5)
    assert said == ["warm closes", "own begins"]


def test_names_and_buckets_are_handed_on():
    updates, *_ = warming()
    assert updates.expecting(["a"], ["x"]) == "warm expects ['a'] in ['x']"
    assert updates.reducing(["x"]) == "warm sums ['x']"
    assert updates.bound("here") == "warm at here"
