"""The documentation's training script, before and after: few lines change, and no weight."""

import difflib
import importlib.util
import os
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from tests.layers.nets import piece_of
from workbench.client.run.own_objects import kept
from workbench.comm.groups.world import World
from workbench.model.weights.initial import initialize
from workbench.plan.experiment.experiment import Experiment, ParameterServer, Synchronous
from workbench.plan.extension.sealed import KEY_FILE
from workbench.plan.extension.user_object import opened
from workbench.plan.plans.plan import Plan
from workbench.store import messages
from workbench.store.cluster_spec import KEY, key_of
from workbench.train.optimizer.state import EMA, entry
from workbench.train.run.rank import RankState, group_specs_of
from workbench.train.run.scoring import evaluate

PAGES = Path(__file__).parents[1] / "notebooks/docs/pages/how-to"
BEFORE, AFTER = (PAGES / "own-problem" / name for name in ("plain.py", "with_workbench.py"))
SAMPLES, EPOCHS = 80, 7  # an epoch has two batches, of 48 and of 32
MOST_LINES = 25


def script(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_shows_what_changes():
    before, after = (path.read_text("utf-8").splitlines() for path in (BEFORE, AFTER))
    names = BEFORE.name, AFTER.name
    shown = [
        line.rstrip() for line in difflib.unified_diff(before, after, *names, n=1, lineterm="")
    ]
    page = (PAGES / "own-problem.md").read_text("utf-8")
    assert "```diff\n" + "\n".join(shown) + "\n```" in page
    assert sum(line.startswith("+") and not line.startswith("+++") for line in shown) <= MOST_LINES


class InOrder:
    """As `DataLoader` is used, in the order of the workbench, and in fp64."""

    def __init__(self, data: Any, batch_size: int, *, shuffle: bool = False, **_: Any) -> None:
        self.data, self.size, self.shuffle, self.epoch = data, batch_size, shuffle, -1

    def __len__(self) -> int:
        return -(-len(self.data) // self.size)

    def __iter__(self):
        self.epoch += 1
        order = np.arange(len(self.data))
        if self.shuffle:
            order = np.random.default_rng((0, self.epoch)).permutation(len(self.data))
        for first in range(0, len(order), self.size):
            samples = [self.data[index] for index in order[first : first + self.size]]
            images, labels = zip(*samples, strict=True)
            yield torch.stack(images).double(), torch.stack(labels)


@pytest.fixture(scope="module")
def data():
    rings = script(BEFORE).Rings
    train, test = rings(SAMPLES), rings(40, first=SAMPLES)
    return [[split[index] for index in range(len(split))] for split in (train, test)]


@pytest.fixture(scope="module")
def expected(data):
    """What the script computes: weights, averaged weights and the F1 score."""
    plain, told = script(BEFORE), []
    network = plain.network
    plain.network = lambda: network().double()
    plain.DataLoader, plain.print = InOrder, told.append
    net, averaged = plain.main(*data, EPOCHS, precision="fp64")
    pieces = [
        {name: piece.detach() for name, piece in model.named_parameters()}
        for model in (net, averaged)
    ]
    return *pieces, float(told[0].rpartition(" ")[2])


class Asked(Exception):
    """Holds the experiment that the script would train."""


class Asking:
    """In the place of a cluster."""

    def train(self, experiment: Experiment) -> None:
        raise Asked(experiment)


@pytest.fixture(scope="module")
def made(data):
    """The experiment, as the script makes it."""
    changed = script(AFTER)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(changed.wb, "Cluster", lambda _: nullcontext(Asking()), raising=False)
        with pytest.raises(Asked) as caught:
            changed.main(*data, EPOCHS, precision="fp64")
    (experiment,) = caught.value.args
    return experiment.replace(data=experiment.data.replace(workers=0))


@pytest.fixture(scope="module")
def asked(made, tmp_path_factory):
    """The same as ranks get it."""
    folder = tmp_path_factory.mktemp("cluster")
    key = key_of(folder)
    given = messages.unpack(messages.pack(kept(made, folder), key), key)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(KEY_FILE, str(folder / KEY))
        yield given


@pytest.fixture(scope="module")
def weights(made, tmp_path_factory):
    graph = made.plan.graph
    return initialize(graph, 0, tmp_path_factory.mktemp("weights"), module=graph.source.module)


PLANS = {
    "as in the script": lambda plan: plan,
    "data parallel": lambda plan: Plan.data_parallel(plan.graph, 4),
    "unequal rows": lambda plan: Plan.data_parallel(plan.graph, 3, (5, 2, 0)),
    "in groups of 4": lambda plan: Plan.hybrid(plan.graph, 4, 4),
    "filters": lambda plan: Plan.filters(plan.graph, 3, (5, 3, 2)),
    "rounds": lambda plan: Plan.hybrid(plan.graph, 4, 2, rounds="B"),
}
STRATEGIES = {
    "synchronous": {},
    "sharded and fused": dict(sync=Synchronous(algorithm="direct"), shard_optimizer=True),
    "parameter server": dict(sync=ParameterServer(server=1)),
}


def on_a_rank(world: World, run: Experiment, file: Path, key_file: str):
    os.environ[KEY_FILE] = key_file
    run = opened(run)
    state = RankState.start(run, world, world.groups(group_specs_of(run.plan)), file, None)
    for step in range(run.steps):
        state.updater.begin(step)
        state.stepper.run(step)
        state.stepper.update()
    names = list(state.model.trainable())
    held = state.updater.state({entry(EMA, name) for name in names})
    averages = {name: held[entry(EMA, name)] for name in names if entry(EMA, name) in held}
    pieces = {name: piece.detach().clone() for name, piece in state.model.trainable().items()}
    given = state.test_data, 16, state.everyone, world.device, state.stepper.dtype, state.scoring
    with state.updater.averaged():
        return pieces, averages, evaluate(state.model, *given)["f1"]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("plan", PLANS)
def test_both_compute_the_same(on_ranks, asked, weights, expected, plan, strategy):
    run = asked.replace(plan=PLANS[plan](asked.plan), **STRATEGIES[strategy])
    trained, averaged, f1 = expected
    for rank, (pieces, averages, score) in enumerate(
        on_ranks(run.plan.world_size, on_a_rank, run, weights, os.environ[KEY_FILE])
    ):
        for name, piece in pieces.items():
            mine = piece_of(run.plan, name, trained[name], rank)
            assert_close(piece, mine, rtol=1e-10, atol=1e-12)
        for name, piece in averages.items():
            mine = piece_of(run.plan, name, averaged[name], rank)
            assert_close(piece, mine, rtol=1e-10, atol=1e-12)
        assert score == pytest.approx(f1, abs=5e-4)  # as it was printed
