"""Search finds what trying every plan finds, and refuses what cannot be asked."""

import pickle
from importlib import import_module
from itertools import combinations, product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import workbench as wb
from tests.layers import heads, nets
from tests.model.traced import calling
from tests.plan import graphs
from tests.predict.search.drawn import convolutions, tokens
from tests.predict.search.machines import machine, machines
from workbench.model.tracing.trace import trace
from workbench.plan.io.errors import ExperimentError, MachineError, PlanError
from workbench.plan.placement.layer_plan import LayerPlan
from workbench.plan.plans.plan import Plan
from workbench.predict.search import MemoryLimitError, search
from workbench.predict.search.choices import options_of
from workbench.predict.search.refusal import bytes_of

MOMENTUM = wb.SGD(lr=0.1, momentum=0.9)


def subsets(names):
    for count in range(len(names) + 1):
        yield from combinations(names, count)


def every_plan(graph, world, recompute=False, options=None):
    sizes = [k for k in range(1, world + 1) if world % k == 0]
    options = options or options_of(graph, world, sizes, {}, {})
    again = [layer.name for layer in graph.layers if layer.rows] if recompute else []
    for choices in product(*options.values()):
        try:
            plan = Plan(graph, world, dict(zip(options, choices, strict=True)))
        except PlanError:  # layers with one table that do not hold it alike
            continue
        for names in subsets(again):
            yield plan.with_recompute(*names) if names else plan


def tried(graph, some, world, batch=8, known=None, **how):
    """(seconds, bytes) of every plan; of a machine whose kernels are alike, bytes are known."""
    experiment = wb.Experiment(
        plan=Plan(graph, world), data="digits", optimizer=MOMENTUM, steps=1, batch_size=batch
    )
    found = []
    for index, plan in enumerate(every_plan(graph, world, **how)):
        prediction = wb.predict(plan, some, experiment)
        peak = known[index][1] if known else prediction.memory.peak_bytes
        found.append((prediction.step_time, peak))
    return found


def searched(graph, some, world, limit=None, **fields):
    given = dict(optimizer=MOMENTUM, batch_size=8, shares=False)
    return search(graph, some, world_size=world, memory_limit=limit, **(given | fields))


def check(graph, some, world, found, limit, **fields):
    fitting = [seconds for seconds, size in found if size <= limit]
    if not fitting:
        with pytest.raises(MemoryLimitError) as info:
            searched(graph, some, world, limit, **fields)
        assert info.value.needed == info.value.least == min(size for _, size in found)
        return
    result = searched(graph, some, world, limit, **fields)
    if result.plan.rounds == "BK":
        assert result.step_time == pytest.approx(min(fitting), rel=1e-9)
    assert result.step_time <= min(fitting) * (1 + 1e-9)
    assert result.gap == 0
    assert result.prediction.memory.peak_bytes <= limit


@pytest.mark.slow
@settings(max_examples=3)
@given(graph=st.one_of(convolutions(most=2), tokens()), some=machines())
def test_it_equals_brute_force(graph, some):
    found = tried(graph, some, 2)
    check(graph, some, 2, found, 2**34)


@pytest.mark.slow
@pytest.mark.parametrize("inner", ["Fused", "Gated", "Masked", "NormedTogether", "TurnedAndFused"])
def test_heads_equal_brute_force(inner):
    graph = trace(heads.made(inner), input_shape=(heads.TOKENS,), vocabulary=heads.VOCABULARY)
    found = None
    for some in (machine(), machine(latency=1e-7, bandwidth=1e10)):
        found = tried(graph, some, 2, known=found)
        check(graph, some, 2, found, 2**34)
        check(graph, some, 2, found, sorted(size for _, size in found)[len(found) // 4])


def test_a_tied_table_equals_brute_force():
    graph = trace(nets.Words(), input_shape=nets.Words.shape, vocabulary=nets.Words.vocabulary)
    for some in (machine(), machine(latency=1e-7, bandwidth=1e6)):
        found = tried(graph, some, 2)
        check(graph, some, 2, found, 2**34)
        low = sorted(size for _, size in found)[len(found) // 4]
        check(graph, some, 2, found, low, recompute=False)


def test_a_tied_table_is_cut_where_that_is_faster():
    graph, some = trace(texts(4, 20_000), input_shape=(4,), vocabulary=20_000), machine()
    result = searched(graph, some, 4, batch_size=32)
    assert result.plan.layers["table"].scheme == "shard_in"
    assert result.plan.layers["scores"].scheme == "shard_out"
    assert result.gap == 0
    chosen, *others = result.why["table"].options
    assert chosen.more_s == 0
    assert {one.choice.scheme for one in others} >= {"replicate"}
    assert result.pareto[0].plan == result.plan
    assert "table" in str(result)
    whole = searched(graph, some, 4, batch_size=32, pin={"scores": "replicate"})
    assert "table" not in whole.plan.layers
    assert whole.step_time > result.step_time


def test_pins_of_layers_with_one_table_must_go_together():
    graph = trace(texts(4, 8), input_shape=(4,), vocabulary=8)
    with pytest.raises(PlanError, match="'table' and 'scores' have the same weights"):
        searched(graph, machine(), 2, pin={"table": "shard_in", "scores": "shard_in"})


def texts(features, vocabulary):
    def forward(self, x):
        return self.scores(self.middle(self.table(x)))

    table = torch.nn.Embedding(vocabulary, features)
    scores = torch.nn.Linear(features, vocabulary, bias=False)
    scores.weight = table.weight
    middle = torch.nn.Linear(features, features)
    return calling(forward, table=table, middle=middle, scores=scores)


def test_groups_of_several_sizes():
    graph, some = graphs.mlp(64, 96, 32), machine()
    check(graph, some, 4, tried(graph, some, 4, batch=64), 2**34, batch_size=64)


def test_presets_are_never_faster():
    graph, some = graphs.vgg(), machine(latency=1e-5, bandwidth=1e7)
    result = searched(graph, some, 4, batch_size=32)
    for plan in (Plan.data_parallel(graph, 4), Plan.hybrid(graph, 4, 2), Plan.hybrid(graph, 4)):
        assert result.step_time <= wb.predict(plan, some, result.prediction.experiment).step_time
    assert result.bound <= result.step_time


def test_a_search_ends_once_it_finds_nothing_better_unless_it_has_a_time_limit(monkeypatch):
    monkeypatch.setattr(import_module("workbench.predict.search.search"), "_IN_VAIN", 0)
    graph, some = graphs.vgg(), machine(latency=1e-3, bandwidth=1e6)
    short = searched(graph, some, 8, batch_size=64)
    long = searched(graph, some, 8, batch_size=64, time_limit=0.5)
    assert short.gap > long.gap > 0
    assert short.judged < long.judged


def test_a_search_without_time_gives_a_plan_and_its_bound():
    result = searched(graphs.vgg(), machine(bandwidth=1e7), 4, batch_size=32, time_limit=1e-9)
    assert 0 < result.bound <= result.step_time
    assert result.judged > 0


def test_unequal_devices_get_unequal_shares():
    graph, some = graphs.mlp(512, 1024, 512), machine(speeds=(3.0, 1.0), latency=1e-8)
    result = searched(graph, some, 2, batch_size=256, shares=True)
    shares = {choice.shares for choice in result.plan.layers.values()}
    assert any(cut and cut[0] > 2 * cut[1] for cut in shares)
    equal = searched(graph, some, 2, batch_size=256)
    assert result.step_time < equal.step_time


PINS = [
    {"fc0": "shard_out"},
    {"fc0": LayerPlan("shard_in", 2)},
    {"fc*": "duplicate"},
    {"fc0": "shard_out", "fc1": "shard_in"},
    {"fc0": LayerPlan("shard_out", 2, (3, 1))},
]


@pytest.mark.parametrize("pin", PINS, ids=str)
def test_pins_are_kept_and_the_rest_is_best(pin):
    graph, some = graphs.mlp(8, 32, 8), machine()
    result = searched(graph, some, 2, pin=pin)
    assert {n.pinned for name, n in result.why.items() if name in pin} <= {True}
    options = options_of(graph, 2, (1, 2), {}, {})
    for name, choice in pin.items():
        for layer in options if name == "fc*" else [name]:
            given = [choice] if isinstance(choice, LayerPlan) else []
            options[layer] = given or [o for o in options[layer] if o.scheme == choice]
            assert result.plan.layers[layer] in options[layer]
    found = tried(graph, some, 2, options=options)
    assert result.step_time == pytest.approx(min(seconds for seconds, _ in found))
    assert result.gap == 0


REFUSED = [
    (dict(pin={"fc": "shard_out"}), PlanError, "no layer 'fc' of Toy; did you mean 'fc"),
    (dict(pin={"fc0": "shard_uot"}), PlanError, "no scheme 'shard_uot'; did you mean 'shard_out'"),
    (dict(pin={"fc0": 3}), PlanError, "must be a scheme"),
    (dict(pin={"fc0": LayerPlan("shard_out", 3)}), PlanError, "group_size 3 does not divide"),
    (dict(pin={"fc0": "shard_out"}, group_sizes=(1,)), PlanError, "impossible in groups of 1"),
    (dict(group_sizes=(3,)), PlanError, "3 does not divide world_size 2; valid are 1, 2"),
    (dict(shares=[(1, 2, 3)]), PlanError, "are for 3 ranks"),
    (dict(limit="much"), PlanError, "such as '2GiB', got 'much'"),
    (dict(limit=-1), PlanError, "positive"),
    (dict(time_limit=0), PlanError, "time_limit must be a positive number"),
    (dict(some=machine(speeds=(1.0, 1.0, 1.0))), MachineError, "has 3 devices"),
    (dict(some=None), MachineError, "search needs a Machine"),
    (dict(graph=3), PlanError, "search needs a Graph"),
    (dict(experiment=3), ExperimentError, "must be an Experiment"),
]


@pytest.mark.parametrize(("fields", "error", "text"), REFUSED, ids=[row[2] for row in REFUSED])
def test_refused(fields, error, text):
    given = dict(graph=graphs.mlp(6, 8, 4), some=machine(), world=2, limit=None) | fields
    with pytest.raises(error, match=text):
        searched(given.pop("graph"), given.pop("some"), given.pop("world"), **given)


@pytest.mark.slow
def test_an_impossible_limit_says_what_is_needed():
    graph, some = graphs.mlp(64, 256, 4), machine()
    with pytest.raises(
        MemoryLimitError, match=r"the leanest plan found for Toy on 2 ranks"
    ) as info:
        searched(graph, some, 2, "1 KiB")
    error = info.value
    experiment = wb.Experiment(
        plan=error.plan, data="digits", optimizer=MOMENTUM, steps=1, batch_size=8
    )
    assert wb.predict(error.plan, some, experiment).memory.peak_bytes == error.needed
    assert f"{error.needed:,} bytes" in str(error)
    assert error.least <= error.needed
    assert searched(graph, some, 2, error.needed).prediction.memory.peak_bytes <= error.needed


@pytest.mark.slow
def test_what_is_found_reads_well():
    graph, some = graphs.vgg(), machine(latency=1e-6, bandwidth=1e7)
    result = searched(graph, some, 2, "1GiB", batch_size=64)
    assert "proven best" in repr(result)
    assert str(result).count("ms") > 3
    html = result._repr_html_()
    assert html.count("<tr>") >= len(result.why) + len(result.pareto)
    front = result.pareto
    assert front[0].step_time == result.step_time
    assert [one.peak_bytes for one in front] == sorted((o.peak_bytes for o in front), reverse=True)
    for name, reason in result.why.items():
        assert min(option.more_s for option in reason.options) >= -1e-9
        assert str(reason).startswith(name)
    again = pickle.loads(pickle.dumps(result))
    assert again.plan == result.plan
    assert str(again) == str(result)


@pytest.mark.slow
def test_the_front_is_what_is_predicted_for_its_plans():
    graph, some = graphs.vgg(), machine(latency=1e-6, bandwidth=1e7)
    front = searched(graph, some, 2, batch_size=64).pareto
    assert len(front) > 1
    for one in front:
        experiment = wb.Experiment(
            plan=one.plan, data="digits", optimizer=MOMENTUM, steps=1, batch_size=64
        )
        prediction = wb.predict(one.plan, some, experiment)
        assert (one.step_time, one.peak_bytes) == (
            prediction.step_time,
            prediction.memory.peak_bytes,
        )
        assert not any(
            other.step_time <= one.step_time and other.peak_bytes <= one.peak_bytes
            for other in front
            if other is not one
        )


def test_units():
    assert bytes_of("2GiB") == 2**31
    assert bytes_of("1.5 MB") == 1_500_000
    assert bytes_of(10) == 10
