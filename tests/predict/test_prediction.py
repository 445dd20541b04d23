"""The public face: one call, a value, tables; and no torch."""

import pickle
import subprocess
import sys
import time
from dataclasses import replace

import pytest

import workbench as wb
from tests.plan import graphs
from workbench.plan.graph.graph import Graph, Input, Layer, Source, Weight
from workbench.plan.io.errors import ExperimentError, PlanError
from workbench.plan.plans.plan import Plan

MOMENTUM = wb.SGD(lr=0.1, momentum=0.9)


def experiment(plan, **fields):
    return wb.Experiment(
        plan=plan, **dict(data="digits", optimizer=MOMENTUM, steps=1, batch_size=8) | fields
    )


def predicted(plan, **fields):
    return wb.predict(plan, None, experiment(plan, **fields))


ORDERS = [
    "import workbench.predict.memory.memory; import workbench as wb",
    "import workbench as wb; wb.predict; import workbench.predict.memory.memory",
    "from workbench import Prediction; import workbench as wb",
    "from workbench.predict.traffic.traffic import Traffic; import workbench as wb",
]


@pytest.mark.slow
@pytest.mark.parametrize("imports", ORDERS)
def test_it_is_the_function_whatever_was_imported_before(imports):
    code = f"{imports}; print(wb.predict.__name__, callable(wb.predict), 'torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", f"import sys; {code}"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["predict", "True", "False"]


def test_the_plan_is_the_one_given():
    graph = graphs.vgg()
    plan = Plan.hybrid(graph, 4)
    other = wb.predict(plan, experiment=experiment(Plan.data_parallel(graph, 2)))
    assert other.experiment.plan == plan
    assert len(other.memory.ranks) == 4


def test_what_is_predicted_is_a_plan_or_an_experiment():
    plan = Plan.data_parallel(graphs.vgg(), 2)
    with pytest.raises(PlanError, match="predict needs a Plan or an Experiment, got None"):
        wb.predict(None)
    with pytest.raises(PlanError, match=r"the Graph of Toy.*data_parallel"):
        wb.predict(plan.graph)
    with pytest.raises(ExperimentError, match=r"got 64; the order is plan or graph, machine"):
        wb.predict(plan, None, 64)
    whole = experiment(plan)
    assert wb.predict(whole) == wb.predict(plan, experiment=whole)
    with pytest.raises(ExperimentError, match="got two"):
        wb.predict(whole, None, whole)


def test_what_is_held_adds_up_and_is_named():
    prediction = predicted(Plan.hybrid(graphs.vgg(), 4, 2))
    layers = {"staging", "sums of gradients", "input", "loss"}
    layers |= {layer.name for layer in prediction.experiment.plan.graph.layers}
    for rank in prediction.memory.ranks:
        assert sum(rank.held.values()) == sum(rank.categories.values()) == rank.peak_bytes
        assert {layer for _, layer in rank.held} <= layers
        assert rank.of_layer("fc1")["weights"] == (32 * 64 + 64 * (rank.rank % 2 == 0)) * 4


@pytest.mark.parametrize("k", [1, 2, 4, 8, 16, 32])
def test_weights_are_split_as_the_savings_say(k):
    """P_conv + P_FC / k, but for what does not divide and what is too small to be cut."""
    graph = graphs.vgg()
    plan = Plan.hybrid(graph, 32, k)
    for rank in predicted(plan, batch_size=32).memory.ranks:
        assert rank.categories["weights"] == 4 * plan.parameters_of(rank.rank)


OPTIMIZERS = [(wb.SGD(lr=0.1), 0), (MOMENTUM, 1), (wb.Adam(), 2), (wb.AdamW(), 2)]


@pytest.mark.parametrize(("optimizer", "copies"), OPTIMIZERS)
def test_copies_of_the_optimizer(optimizer, copies):
    graph = graphs.mlp(50, 40, 30)
    held = predicted(Plan.data_parallel(graph, 2), optimizer=optimizer).memory[0].categories
    counts = 4 * 4 if copies == 2 else 0  # a step count for each of four parameters
    assert held["optimizer"] == copies * held["weights"] + counts


def test_unequal_pieces_make_unequal_ranks():
    graph = graphs.mlp(64, 4096, 4096, 10)
    plan = Plan.hybrid(graph, 2).with_layer("fc0", shares=(3, 1)).with_layer("fc1", shares=(3, 1))
    first, second = predicted(plan).memory.ranks
    assert first.peak_bytes > 2 * second.peak_bytes


def test_rounds_need_less_for_activations():
    graph = graphs.mlp(16, 32, 1024, 1024, 5)
    plan = Plan.hybrid(graph, 4)
    peak = {
        scheme: predicted(plan.with_rounds(scheme), batch_size=16384).memory.peak_bytes
        for scheme in ("BK", "B", "B/K")
    }
    assert max(peak["B"], peak["B/K"]) < 0.7 * peak["BK"]


def test_reads_well():
    plan = Plan.hybrid(graphs.vgg(), 4, 2)
    prediction = predicted(plan)
    assert repr(prediction).startswith("<Prediction Toy on 4 ranks: at most ")
    text, html = str(prediction), prediction._repr_html_()
    for word in ("rank", "weights", "backward of", "reduce_scatter", "gradients"):
        assert word in text
        assert word in html
    assert html.count("<table>") == html.count("</table>") == 2
    assert pickle.loads(pickle.dumps(prediction)) == prediction
    assert pickle.loads(pickle.dumps(prediction.memory)) == prediction.memory


def test_says_what_it_had_to_guess():
    builder = graphs.Builder((6,)).linear("fc", 8).same("strange", "op").linear("out", 5)
    prediction = predicted(Plan.data_parallel(builder.graph(), 2))
    assert prediction.memory.guessed == ("strange",)
    caution = "what strange keep for their backward pass is not known"
    assert caution in str(prediction)
    assert caution in prediction._repr_html_()
    assert "not known" not in str(predicted(Plan.data_parallel(graphs.vgg(), 2)))


def test_long_tables_say_what_they_leave_out():
    lines = str(predicted(Plan.data_parallel(graphs.vgg(), 64), batch_size=64)).splitlines()
    assert "... 24 more ranks" in lines


def deep(blocks):
    """A residual network as deep as ResNet-152, by hand."""
    layers, last = [], "input"

    def add(name, kind, channels, *reads, weights=()):
        nonlocal last
        shape = (channels, 8, 8)
        read = reads or (last,)
        layers.append(Layer(name, kind, read, shape, shape, weights=weights, node=name))
        last = name

    for index in range(blocks):
        begin = last
        for part in "abc":
            name = f"{part}{index}"
            add(name, "conv2d", 64, weights=(Weight(f"{name}.weight", (64, 64, 3, 3)),))
            norm = tuple(Weight(f"n{name}.{w}", (64,)) for w in ("weight", "bias"))
            add(f"n{name}", "batch_norm", 64, weights=norm)
            add(f"r{name}", "elementwise", 64)
        add(f"sum{index}", "add", 64, last, begin)
    shape = (64,)
    layers.append(Layer("pool", "pool", (last,), (64, 8, 8), shape, target="Tensor.mean"))
    return Graph(Source("module", "Deep"), (Input((64, 8, 8)),), 64, tuple(layers), ("pool",))


@pytest.mark.slow
def test_is_quick_enough_to_follow_a_mouse():
    """ResNet-152 x 8 ranks; the bound leaves room for machines that are busy with other things."""
    plan, machine = Plan.data_parallel(deep(50), 8), wb.Machine.preset("h100-nvlink")
    fastest = float("inf")
    for _ in range(5):
        began = time.process_time()
        prediction = wb.predict(plan, machine, experiment(plan))
        assert prediction.step_time > 0
        assert prediction.memory.peak_bytes > 0
        assert prediction.traffic.received_bytes(0) > 0
        fastest = min(fastest, time.process_time() - began)
    assert fastest < 0.2


def test_what_is_recomputed_is_not_held():
    graph = graphs.mlp(16, *[512] * 8, 5)
    plain, again = (
        predicted(Plan.data_parallel(graph, 2).with_recompute(*names), batch_size=8192).memory
        for names in ([], ["*[0-2]", "*[4-6]"])
    )
    assert again.peak_bytes < 0.8 * plain.peak_bytes


def test_sharded_optimizers_have_their_part():
    graph = graphs.mlp(64, 256, 10)
    whole, part = (
        predicted(Plan.data_parallel(graph, 4), shard_optimizer=sharded).memory
        for sharded in (False, True)
    )
    held = [rank.categories["optimizer"] for rank in part.ranks]
    assert sum(held) == whole[0].categories["optimizer"]
    assert max(held) - min(held) <= 2 * 4 * 64


@pytest.mark.parametrize("uncounted", [False, True])
def test_time_without_known_flops_is_said_to_be_too_little(uncounted):
    graph = graphs.Builder((8,)).linear("a", 6).same("tree", "op").linear("b", 10).graph()
    layers = [replace(x, uncounted=uncounted and x.name == "tree") for x in graph.layers]
    plan = Plan.data_parallel(replace(graph, layers=tuple(layers)), 2)
    prediction = wb.predict(plan, wb.Machine.preset("cpu-1gbe"), experiment(plan))
    assert prediction.underestimated == (("tree",) if uncounted else ())
    assert ("or more, " in repr(prediction)) == uncounted
    for shown in (str(prediction), prediction._repr_html_()):
        assert ("Too little: FLOPs of tree are not known" in shown) == uncounted
