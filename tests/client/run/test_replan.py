"""A running experiment goes on under another plan, and is still the same run."""

import threading

import pytest
from torch import nn

import workbench as wb
from workbench.plan.plans.reshard import Reshard
from workbench.store.errors import ClusterError, RunError

LONG_S = 120.0

NET = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
GRAPH = wb.trace(NET, input_shape=(1, 8, 8))
WHOLE, HALVES = wb.Plan.data_parallel(GRAPH, 2), wb.Plan.hybrid(GRAPH, 2)
UNEQUAL = HALVES.with_layer("1", shares=(3, 1)).with_layer("3", shares=(3, 1)).with_rows((3, 1))


@pytest.fixture
def experiment():
    return wb.Experiment(
        plan=WHOLE,
        data="digits",
        batch_size=64,
        optimizer=wb.SGD(lr=0.1, momentum=0.9),
        steps=600,
        precision="fp64",
    )


@pytest.mark.slow
def test_a_run_goes_on_under_other_plans_without_losing_a_step(cluster, experiment):
    straight = cluster.train(experiment, module=NET).wait(LONG_S)
    run = cluster.train(experiment, module=NET)
    halves = run.replan(HALVES)
    assert halves.wait(LONG_S).received_bytes == halves.cost.received_bytes == (0, 0)
    unequal = run.replan(UNEQUAL)
    reshard, momentum = Reshard(HALVES, UNEQUAL), dict.fromkeys(GRAPH.trainable, 1)
    expected = tuple(8 * reshard.received(rank, momentum) for rank in range(2))
    assert unequal.cost.received_bytes == expected
    assert unequal.wait(LONG_S).received_bytes == expected
    run.wait(LONG_S)
    assert run.state == "finished"
    assert run.experiment.plan == UNEQUAL
    assert run.metrics["step"].tolist() == straight.metrics["step"].tolist()
    assert run.metrics["loss"].tolist() == pytest.approx(
        straight.metrics["loss"].tolist(), rel=1e-9
    )
    assert sum("under another plan since step" in note for note in run.notes) == 2
    assert wb.Experiment.load(run.checkpoint / "experiment.toml").plan == UNEQUAL


@pytest.mark.slow
def test_nothing_of_the_plan_before_stays_in_memory(cluster, experiment):
    """As little as of a run that had the plan from the beginning."""
    direct = cluster.train(experiment.replace(plan=HALVES, steps=20), module=NET).wait(LONG_S)
    run = cluster.train(experiment, module=NET)
    change = run.replan(HALVES)
    run.wait(LONG_S)
    later = run.metrics[run.metrics["step"] > change.carried_out.step + 2]
    for column in ("peak_bytes", "staging_bytes"):
        assert later[column].max() <= direct.metrics[column].max()


@pytest.mark.slow
def test_it_is_resumed_under_its_last_plan(cluster, experiment):
    run = cluster.train(experiment.replace(steps=100_000), module=NET)
    run.replan(HALVES).wait(LONG_S)
    run.stop()
    run.wait(LONG_S)
    assert run.experiment.plan == HALVES
    done = int(run.metrics["step"].max())
    run.resume()
    run.replan(WHOLE).wait(LONG_S)
    run.stop()
    run.wait(LONG_S)
    assert run.experiment.plan == WHOLE
    assert run.metrics["step"].max() > done


@pytest.mark.slow
def test_another_learning_rate_stays_when_it_is_resumed_and_attached_to(cluster, experiment):
    run = cluster.train(experiment.replace(steps=100_000), module=NET)
    changed = run.set_lr(0.025).wait(LONG_S)
    saved = run.checkpoint_now().wait(LONG_S)
    assert changed.before == 0.1
    assert saved.step > changed.step
    assert wb.Experiment.load(run.checkpoint / "experiment.toml").optimizer.lr == 0.025
    run.stop()
    run.wait(LONG_S)
    run.resume()
    attached = cluster.jobs[run.id]
    run.checkpoint_now().wait(LONG_S)
    for each in (run, attached):
        each.stop()
        each.wait(LONG_S)
        assert f"learning rate 0.025 since step {changed.step}" in each.notes
        assert each.experiment.optimizer.lr == 0.025
    assert wb.Experiment.load(run.checkpoint / "experiment.toml").optimizer.lr == 0.025
    assert attached.engines == (0, 1)
    assert any("stopped" in event.text for event in attached.events())


@pytest.mark.slow
def test_a_rank_that_dies_during_a_re_cut_loses_nothing(cluster, experiment, monkeypatch):
    """The run goes on from its last checkpoint, under the plan of then, and then under the new."""
    experiment = experiment.replace(plan=HALVES, checkpoint_every=10, steps=300)
    straight = cluster.train(experiment, module=NET).wait(LONG_S)
    monkeypatch.setattr(cluster, "task", "tests.client.dying_reshard:train")
    run = cluster.train(experiment, module=NET)
    _until(run, 12)
    replan = run.replan(UNEQUAL)
    try:
        run.wait(LONG_S)
    except RunError:
        assert run.checkpoint is not None
        assert wb.Experiment.load(run.checkpoint / "experiment.toml").plan == HALVES
        assert replan.carried_out is None
        run.resume().wait(LONG_S)
    assert (run.directory / "one has died").exists()
    assert run.state == "finished"
    assert replan.carried_out is not None
    assert run.experiment.plan == UNEQUAL
    losses = run.metrics.groupby("step")["loss"].first()
    expected = straight.metrics.groupby("step")["loss"].first()
    assert losses.tolist() == pytest.approx(expected.tolist(), rel=1e-9)


def _until(run, step):
    reached = threading.Event()
    end = run.subscribe(
        lambda rows: reached.set() if any(row["step"] >= step for row in rows) else None
    )
    assert reached.wait(LONG_S)
    end()


def test_what_cannot_be_is_refused_and_nothing_happens(cluster, experiment):
    run = cluster.train(experiment.replace(steps=100_000), module=NET)
    with pytest.raises(wb.PlanError, match="cannot go on on 1"):
        run.replan(wb.Plan.data_parallel(GRAPH, 1))
    other = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    with pytest.raises(wb.PlanError, match="cannot go on as"):
        run.replan(wb.Plan.data_parallel(wb.trace(other, input_shape=(1, 8, 8)), 2))
    run.stop()
    run.wait(LONG_S)
    with pytest.raises(ClusterError, match="has ended"):
        run.replan(HALVES)
