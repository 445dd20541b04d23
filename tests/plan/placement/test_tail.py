"""Where a plan's tail begins, what runs in rounds, and what cannot."""

import pickle
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.plan.graphs import Builder, mlp, vgg
from workbench.plan.graph.graph import Weight
from workbench.plan.io.errors import PlanError
from workbench.plan.placement.rounds import ROUNDS, RoundsError, round_rows
from workbench.plan.plans.plan import Plan

PLAN = Plan.hybrid(vgg(), 4, 2)


def test_the_tail_begins_at_the_gather():
    assert PLAN.tail is not None
    assert (PLAN.tail.boundary, PLAN.tail.group_size) == ("pool", 2)
    names = {layer.name for layer in vgg().layers}
    assert PLAN.tail.layers == names - {"conv", "relu", "pool"}


def test_every_branch_behind_the_gather_is_in_the_tail():
    net = Builder((8,)).linear("fc", 8)
    net.linear("left", 8, "fc").linear("left2", 8, "left")
    net.linear("right", 8, "fc").linear("right2", 8, "right").same("join", "add", "left2", "right2")
    plan = Plan.data_parallel(net.graph(), 4).with_layer("fc", scheme="shard_out", group_size=2)
    assert plan.tail.layers == {layer.name for layer in net.graph().layers} - {"input"}


@pytest.mark.parametrize("rounds", ROUNDS)
def test_rounds_are_part_of_the_value(rounds, tmp_path):
    plan = PLAN.with_rounds(rounds)
    assert plan == Plan.hybrid(vgg(), 4, 2, rounds=rounds)
    assert len({plan, PLAN}) == (1 if rounds == "BK" else 2)
    assert plan.with_rounds("BK") == PLAN
    plan.save(tmp_path / "plan.toml")
    assert Plan.load(tmp_path / "plan.toml") == plan
    assert pickle.loads(pickle.dumps(plan)) == plan
    for shown in (repr(plan), str(plan), plan._repr_html_()):
        assert ("in rounds" in shown) == (rounds != "BK")
    assert rounds == "BK" or f"in rounds {rounds}" in repr(plan)


def test_text_without_rounds_is_of_one_round():
    assert Plan.from_toml(PLAN.to_toml().replace('rounds = "BK"\n', "")) == PLAN


@pytest.mark.parametrize("given", ["BK/", "b/k", "KB", 3, None])
def test_no_such_rounds(given):
    with pytest.raises(PlanError, match=r"no rounds .*(did you mean|there are 'B', 'B/K', 'BK')"):
        PLAN.with_rounds(given)
    with pytest.raises(PlanError, match="no rounds 'B-K'; did you mean"):
        Plan.from_toml(PLAN.to_toml().replace('rounds = "BK"', 'rounds = "B-K"'))


def test_data_parallelism_is_one_round():
    plan = Plan.hybrid(vgg(), 4, 1, rounds="B/K")
    assert plan.tail is None


def test_a_replicated_layer_behind_the_tail_runs_in_rounds_too():
    plan = PLAN.with_layer("fc2", scheme="replicate").with_rounds("B")
    assert "fc2" in plan.tail.layers


def split(graph, **groups):
    plan = Plan.data_parallel(graph, 4)
    for name, k in groups.items():
        plan = plan.with_layer(name, scheme="shard_out", group_size=k)
    return plan


def normed():
    builder = Builder((3, 8, 8)).conv("conv", 4).conv("wide", 8).norm("bn")
    return builder.add("flatten", "flatten", (512,)).linear("fc", 5).graph()


def skipping():
    builder = Builder((8,)).linear("a", 8).linear("b", 8).linear("c", 8)
    return builder.same("sum", "add", "c", "a").linear("d", 5).graph()


def scaled(*readers):
    """A parameter that multiplies what `readers` read."""
    builder = Builder((8,)).linear("a", 8)
    weights = (Weight("scale", (8,)),)
    builder.add("scale", "parameter", (8,), weights=weights, rows=0)
    layers = [replace(x, inputs=()) if x.name == "scale" else x for x in builder.layers]
    builder.layers[:] = layers
    builder.same("m1", "mul", "a", *(["scale"] if "m1" in readers else ["a"]))
    builder.linear("b", 8, "m1")
    builder.same("m2", "op", "b", *(["scale"] if "m2" in readers else ["b"]))
    return split(builder.linear("c", 8).graph(), b=2)


def test_a_parameter_that_the_tail_reads_is_its_own():
    assert scaled("m2").tail.layers == {"b", "m2", "c", "scale"}
    assert scaled("m1").tail.layers == {"b", "m2", "c"}
    with pytest.raises(RoundsError, match=r"layer 'scale' is read by 'm2' .* and by 'm1' before"):
        scaled("m1", "m2").with_rounds("B")


def test_so_is_what_is_computed_from_parameters_alone():
    graph = scaled("m2").graph
    layers = []
    for layer in graph.layers:
        if layer.name == "m2":
            scale = next(x for x in graph.layers if x.name == "scale")
            squared = replace(scale, name="squared", node="squared", kind="op", weights=())
            layers.append(replace(squared, inputs=("scale",)))
            layer = replace(layer, inputs=("b", "squared"))
        layers.append(layer)
    plan = split(replace(graph, layers=tuple(layers)), b=2)
    assert plan.tail.layers == {"b", "m2", "c", "scale", "squared"}


@pytest.mark.parametrize(
    ("plan", "says"),
    [
        (
            split(mlp(9, 8, 8, 8, 4), fc0=2, fc2=2).with_layer("fc1", scheme="replicate"),
            "layer 'fc2' gathers rows of 'relu1' after layer 'fc0' has gathered those of 'input'",
        ),
        (
            split(mlp(9, 8, 8, 4), fc0=2, fc1=4),
            "layer 'fc1' gathers rows of 'fc0' over 4 ranks after layer 'fc0'|over 4 ranks",
        ),
        (split(normed(), wide=2), r"layer 'bn' \(batch_norm\) is behind the gather of 'conv'"),
        (split(skipping(), c=2), "layer 'sum' is behind the gather of 'b' and also reads 'a'"),
    ],
)
@pytest.mark.parametrize("rounds", ["B", "B/K"])
def test_what_is_no_tail_is_refused_by_name(plan, says, rounds):
    with pytest.raises(RoundsError, match=says) as caught:
        plan.with_rounds(rounds)
    assert "valid are rounds 'BK'" in str(caught.value)
    with pytest.raises(PlanError, match=says):
        Plan.from_toml(plan.to_toml().replace('rounds = "BK"', f'rounds = "{rounds}"'))


def test_a_change_of_a_layer_falls_back_with_a_warning():
    plan = split(mlp(9, 8, 8, 8, 4), fc0=2).with_rounds("B/K")
    with pytest.warns(UserWarning, match="rounds 'B/K' became 'BK'.*layer 'fc2' gathers rows"):
        changed = plan.with_layer("fc2", scheme="shard_out", group_size=2)
    assert changed.rounds == "BK"
    assert "fc2" in changed.layers


@given(st.lists(st.integers(0, 9), min_size=4, max_size=4), st.sampled_from([1, 2, 4]))
def test_rounds_bring_every_row_once(rows, k):
    for rounds in ROUNDS:
        brought = round_rows(rounds, tuple(rows), k)
        assert len(brought) == (1 if rounds == "BK" else k)
        assert [sum(part[rank] for part in brought) for rank in range(4)] == rows
    for part in round_rows("B", tuple(rows), k):
        assert all(sum(n > 0 for n in part[first : first + k]) <= 1 for first in range(0, 4, k))
    for rank, n in enumerate(rows):
        held = [part[rank] for part in round_rows("B/K", tuple(rows), k)]
        assert max(held) - min(held) <= 1
        assert sum(held) == n
