"""Shares that follow measured times while a run goes on."""

import random
import re
from dataclasses import dataclass, replace

import pytest
from torch import nn

import workbench as wb
from tests.plan.graphs import Builder
from workbench.client.calibration.rebalancer import Rebalancer
from workbench.train.run.requests import CarriedOut

LONG_S = 240.0
PAIR = wb.Plan.data_parallel(Builder((8, 4, 4)).conv("a", 8).graph(), 2)
NET = nn.Sequential(
    nn.Conv2d(1, 32, 3, padding=1),
    nn.ReLU(),
    nn.Conv2d(32, 32, 3, padding=1),
    nn.ReLU(),
    nn.Flatten(),
    nn.Linear(8 * 8 * 32, 10),
)


@dataclass
class RequestHandle:
    """A re-cut that is carried out at once, or not yet."""

    carried_out: CarriedOut | None


def given(row, seconds, samples):
    """The same row, of a rank that computed so long and did nothing else."""
    idle = {"communication_s": 0.0, "wait_s": 0.0}
    return {**row, **idle, "compute_s": seconds, "samples_per_s": samples / seconds}


class FakeRun:
    """A run on devices of given speeds, step by step."""

    is_done = False
    is_ragged = False

    def __init__(self, plan, batch_size, speeds, split):
        self.experiment = wb.Experiment(
            plan=plan, data="digits", batch_size=batch_size, optimizer=wb.SGD(lr=0.1), steps=1000
        )
        self.speeds, self.split, self.step, self.plans = speeds, split, 0, []
        self.notes, self.noise, self.scatter = [], {}, ((1.0,) * len(speeds),)

    def subscribe(self, callback):
        self.callback = callback
        return lambda: None

    def replan(self, plan):
        self.plans.append(plan)
        self.experiment = self.experiment.replace(plan=plan)
        return RequestHandle(CarriedOut(self.step + 1, 0.1, (0,) * plan.world_size))

    @property
    def samples(self):
        """Of this step: every fifth batch is short, if it is so requested."""
        batch_size = self.experiment.batch_size
        return batch_size // 8 if self.is_ragged and self.step % 5 == 4 else batch_size

    @property
    def units(self):
        if self.split == "rows":
            return self.experiment.plan.rows_of(self.experiment.batch_size)
        return wb.apportion(64, self.experiment.plan.row_shares or (1,) * len(self.speeds))

    def run(self, steps):
        for _ in range(steps):
            times = [0.01 + units / v for units, v in zip(self.units, self.speeds, strict=True)]
            for rank, seconds in enumerate(times):
                seconds *= self.samples / self.experiment.batch_size
                seconds *= self.scatter[self.step % len(self.scatter)][rank]
                seconds *= (1, 4, 16)[self.step % 3] if self.noise.get(rank) else 1
                self.callback([given({"step": self.step, "rank": rank}, seconds, self.samples)])
            self.step += 1
        return (max(times) - min(times)) / max(times)


@pytest.mark.parametrize("split", ["rows", "filters"])
@pytest.mark.parametrize("speeds", [(2, 1, 1), (4, 2, 1)])
def test_shares_follow_speeds_and_changes_of_speed(split, speeds):
    graph = Builder((8, 4, 4)).conv("a", 512).conv("b", 512).graph()
    run = FakeRun(wb.Plan.data_parallel(graph, 3), 240, speeds, split)
    balancer = Rebalancer(run, split=split, grain=1)
    run.run(20)
    assert 1 <= len(balancer.changes) <= 4
    assert run.run(4) <= (0.05 if split == "rows" else 0.12)  # a 64th is coarse
    before = len(balancer.changes)
    run.speeds = (speeds[0] / 3, *speeds[1:])
    run.run(20)
    assert before < len(balancer.changes) <= before + 4
    assert run.run(4) <= (0.05 if split == "rows" else 0.12)
    assert f"{split} " in repr(balancer)


def test_short_batches_do_not_count(tmp_path):
    """Alone, they would make times scatter beyond what is believed."""
    run = FakeRun(PAIR, 240, (3, 1), "rows")
    run.is_ragged = True
    balancer = Rebalancer(run, patience=6)
    run.run(9)
    assert run.units == (180, 60)
    assert balancer.notes == []
    (change,) = balancer.changes
    assert balancer.to_frame().to_numpy().tolist() == [
        [change.seen_at, change.replan.carried_out.step, 0.1, "180:60"]
    ]
    assert "180:60" in balancer._repr_html_()
    balancer.save(tmp_path / "x.csv")
    assert "180:60" in (tmp_path / "x.csv").read_text("utf-8")


def test_shares_that_leave_a_layer_too_few_rows_are_noted_and_not_taken():
    graph = Builder((8,)).linear("a", 8).norm("bn").linear("b", 8).graph()
    layers = [replace(x, least_rows=2) if x.name == "bn" else x for x in graph.layers]
    plan = wb.Plan.data_parallel(replace(graph, layers=tuple(layers)), 2)
    run = FakeRun(plan, 14, (10, 1), "rows")  # a whole number of batches
    balancer = Rebalancer(run)
    run.run(20)
    assert balancer.changes == []
    assert run.units == (7, 7)
    assert len(balancer.notes) == 1
    assert re.search("shares stay as they are: .*rank 1 has 1 row", balancer.notes[0])


def test_equal_devices_are_left_alone():
    run = FakeRun(
        wb.Plan.data_parallel(Builder((8, 4, 4)).conv("a", 8).graph(), 2), 64, (1, 1), "rows"
    )
    balancer = Rebalancer(run)
    run.run(30)
    assert balancer.changes == []
    assert balancer.imbalance == 0.0


def test_a_rank_whose_times_do_not_converge_is_reported_and_its_last_model_kept():
    graph = Builder((8, 4, 4)).conv("a", 8).graph()
    run = FakeRun(wb.Plan.data_parallel(graph, 2), 240, (3, 1), "rows")
    run.noise = {1: True}
    balancer = Rebalancer(run)
    run.run(40)
    assert balancer.changes == []  # nothing is known of it yet
    assert re.search(r"rank 1 did not converge: .* s \+- \d+% in 24 steps", balancer.notes[0])
    assert "nothing changes" in balancer.notes[0]
    run.noise = {}
    run.run(9)
    assert balancer.changes
    sizes, before = run.units, len(balancer.changes)
    run.noise = {1: True}
    run.run(60)
    assert run.units == sizes  # by its last model they are right
    assert len(balancer.changes) == before
    assert "its last model is kept" in balancer.notes[1]
    assert run.notes == balancer.notes


def test_no_other_split_is_known():
    with pytest.raises(ValueError, match="no split 'columns'"):
        Rebalancer(
            FakeRun(
                wb.Plan.data_parallel(Builder((8,)).linear("a", 8).graph(), 2), 4, (1, 1), "rows"
            ),
            split="columns",
        )


def test_what_may_be_chance_changes_nothing():
    """Two ranks that are slow by turns are equal; one that is slower in spite of that is not."""
    run = FakeRun(PAIR, 240, (1, 1), "rows")
    run.scatter = ((1.0, 1.3), (1.3, 1.0))
    balancer = Rebalancer(run)
    run.run(60)
    assert balancer.changes == []
    run.speeds = (1, 0.6)
    run.run(30)
    assert balancer.changes
    assert run.units[0] > run.units[1]


def test_a_large_change_is_followed_at_once_though_steps_scatter():
    run = FakeRun(PAIR, 240, (1, 1), "rows")
    rng = random.Random(0)
    run.scatter = tuple((rng.uniform(0.8, 1.25), rng.uniform(0.8, 1.25)) for _ in range(31))
    balancer = Rebalancer(run)
    run.run(24)
    assert balancer.changes == []
    run.speeds = (1, 1 / 3)
    run.run(3)
    assert len(balancer.changes) == 1
    assert run.units[0] > 1.5 * run.units[1]


class GivenTimes:
    """A run whose ranks compute as long as is given, whatever they take."""

    def __init__(self, run, seconds_of):
        self.run, self.seconds_of = run, seconds_of

    def subscribe(self, callback):
        return self.run.subscribe(
            lambda rows: callback([given(row, self.seconds_of(row), 64) for row in rows])
        )

    def __getattr__(self, name):
        return getattr(self.run, name)


@pytest.mark.slow
def test_a_slow_engine_gets_fewer_rows(cluster):
    """On engines, by given times: re-cuts under way, until rows are as the speeds."""
    plan = wb.Plan.data_parallel(wb.trace(NET, input_shape=(1, 8, 8)), 2)
    experiment = wb.Experiment(
        plan=plan,
        data="digits",
        batch_size=64,
        optimizer=wb.SGD(lr=0.01),
        steps=100_000,
        evaluate_every=None,
    )
    run = cluster.train(experiment, module=NET)
    balancer = Rebalancer(GivenTimes(run, lambda row: (0.1, 0.3)[row["rank"]] * _part(run, row)))
    unsubscribe = run.subscribe(lambda rows: run.stop() if _unequal(run) else None)
    run.wait(LONG_S)
    unsubscribe()
    assert run.state == "stopped"
    assert balancer.changes
    assert run.experiment.plan.rows_of(64) == (48, 16)


def _part(run, row):
    return run.experiment.plan.rows_of(64)[row["rank"]] / 64


def _unequal(run):
    return run.experiment.plan.row_shares is not None
