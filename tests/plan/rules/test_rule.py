"""Plan rules: the built-in ones, a person's own, and what they are checked for."""

import itertools

import pytest

from tests.plan.graphs import mlp, transformer
from workbench.plan import Plan, PlanError
from workbench.plan.plans.rule import BUILT_IN, GroupRule, Rule, checks_of, plan_by

GRAPHS = [mlp(8, 16, 4), transformer()]


class Halves(Rule):
    """Cuts the largest linear layer."""

    def plan(self, graph, world_size):
        linear = [layer for layer in graph.layers if layer.kind == "linear"]
        largest = max(linear, key=lambda layer: layer.parameters)
        return Plan.data_parallel(graph, world_size).with_layer(largest.name, scheme="shard_out")


class Returning(Rule):
    def __init__(self, made):
        self.made = made

    def plan(self, graph, world_size):
        return self.made(graph, world_size)


@pytest.mark.parametrize("rule", [*BUILT_IN.values(), Halves()], ids=lambda rule: rule.name)
def test_right_ones_pass(rule):
    found = checks_of(rule, GRAPHS)
    assert len(found) == 3
    assert all(check.ok for check in found), found


def test_the_built_in_ones_are_the_plans_of_that_name():
    graph = GRAPHS[0]
    assert plan_by(BUILT_IN["data parallel"], graph, 4) == Plan.data_parallel(graph, 4)
    assert plan_by(BUILT_IN["hybrid"], graph, 4, 2) == Plan.hybrid(graph, 4, 2)
    assert plan_by(BUILT_IN["filters"], graph, 4) == Plan.filters(graph, 4)
    assert [isinstance(rule, GroupRule) for rule in BUILT_IN.values()] == [False, True, True]


class Odd(Plan):
    """A plan that text does not tell from others."""


count = itertools.count()


def changing(graph, world):
    """Every call makes another plan."""
    return Plan.data_parallel(graph, world).with_rows(range(next(count) + 1, world + 50)[:world])


@pytest.mark.parametrize(
    ("made", "failing", "text"),
    [
        (lambda graph, world: {}[graph], "valid plan", "rule 'Returning': KeyError"),
        (lambda graph, world: None, "valid plan", "made no Plan, but NoneType"),
        (lambda graph, world: Plan.data_parallel(graph, 3), "valid plan", "for 3 ranks"),
        (lambda graph, world: Plan.hybrid(graph, world, 2), "valid plan", "does not divide"),
        (changing, "equal plans", "and then"),
        (lambda graph, world: Odd(graph, world), "survive", "comes back as"),
    ],
)
def test_wrong_ones_are_found(made, failing, text):
    worlds = (2, 4) if made is changing else (1, 2)
    found = checks_of(Returning(made), GRAPHS, worlds)
    (check,) = [check for check in found if failing in check.what]
    assert not check.ok
    assert text in check.said


def test_what_a_rule_raises_keeps_its_own_reason():
    with pytest.raises(PlanError, match="rule 'hybrid': group_size 3 does not divide world_size 4"):
        plan_by(BUILT_IN["hybrid"], GRAPHS[0], 4, 3)
