"""Bytes that a rank receives for activations and for averaging, against SplitBrain's formulas."""

import pytest

from tests.train.runs import started
from workbench.bench.harness.nets import INPUT_SHAPE, SmallVGG
from workbench.comm.groups.world import World
from workbench.model.tracing.trace import trace
from workbench.model.weights.initial import initialize
from workbench.plan.experiment.experiment import SGD, Experiment, LocalSGD, Synchronous, Synthetic
from workbench.plan.plans.plan import Plan

WIDTH, RANKS, ROWS, FLOAT = 4, 4, 2, 4
GRAPH = trace(SmallVGG(WIDTH), input_shape=INPUT_SHAPE)
STEPS = 5
BOUNDARY, HIDDEN = 64 * WIDTH, 16 * WIDTH
CUT = (BOUNDARY + 1) * HIDDEN + (HIDDEN + 1) * HIDDEN  # parameters of the two layers that are cut
LAST = (HIDDEN + 1) * 10
CONVOLUTIONS = GRAPH.parameters - CUT - LAST


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    module = SmallVGG(WIDTH)
    return initialize(GRAPH, 0, tmp_path_factory.mktemp("weights"), module=module)


def received(config, experiment, weights):
    """Bytes of all steps: of activations, and of gradients or parameters."""
    with World.open(config) as world:
        state = started(world, experiment, weights)
        for step in range(experiment.steps):
            state.stepper.run(step)
            state.stepper.update()
        rows = [row for row in world.recorder.rows() if row.layer != "labels"]
    activations = sum(row.bytes for row in rows if row.phase != "step")
    return activations, sum(row.bytes for row in rows if row.phase == "step")


def averaged(parameters, replicas):
    """Bytes of an all-reduce: 2 (n-1)/n of what is summed."""
    return 2 * (replicas - 1) / replicas * parameters * FLOAT


@pytest.mark.parametrize("sync", [Synchronous(), LocalSGD(every=5)], ids=["c=1", "c=5"])
@pytest.mark.parametrize("k", [1, 2, 4])
def test_received_bytes_are_those_of_the_formulas(on_ranks, weights, k, sync):
    """splitbrain.md section 6, the exact form, with the last linear layer replicated."""
    plan = Plan.data_parallel(GRAPH, RANKS)
    for name, scheme in {"0": "shard_out", "3": "shard_out", "6": "duplicate"}.items():
        plan = plan.with_layer(f"classifier.{name}", scheme=scheme, group_size=k)
    run = Experiment(
        plan=plan,
        data=Synthetic(samples=64),
        batch_size=ROWS * RANKS,
        optimizer=SGD(lr=0.1),
        steps=STEPS,
        sync=sync,
    )
    boundary, first, second = 2 * BOUNDARY, 2 * HIDDEN, HIDDEN  # the last reader is whole
    activations = STEPS * (k - 1) * ROWS * (boundary + first + second) * FLOAT
    averagings = 1 if isinstance(sync, LocalSGD) else STEPS
    replicas = RANKS // k
    sums = averaged(CONVOLUTIONS, RANKS) + averaged(CUT / k + LAST, replicas)
    for found in on_ranks.seated(RANKS, received, run, weights):
        # Segments of a sum differ by an element.
        assert found == (activations, pytest.approx(averagings * sums, rel=1e-3))
