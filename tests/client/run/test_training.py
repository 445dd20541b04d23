"""The whole way: a model, a plan, real ranks, a checkpoint, a proof."""

import copy
import os
import pickle
import signal
from contextlib import suppress

import pytest
import torch
from torch import nn

import workbench as wb
from tests.client.interrupts import interrupt_inside
from workbench.client.run.job import Job
from workbench.model.errors import ModelError
from workbench.plan.graph.graph import Input
from workbench.store.errors import ClusterError
from workbench.store.process import RENDEZVOUS, holder
from workbench.train.data.datasets import open_data

LONG_S = 300.0


NET = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


@pytest.fixture(scope="module")
def experiment() -> wb.Experiment:
    """A module of the user's own, its two layers cut over both ranks."""
    plan = wb.Plan.hybrid(wb.trace(NET, input_shape=(1, 8, 8)), world_size=2)
    assert {choice.scheme for choice in plan.layers.values()} == {"shard_out", "shard_in"}
    return wb.Experiment(
        plan=plan, data="digits", batch_size=64, optimizer=wb.SGD(lr=0.1), steps=30
    )


@pytest.fixture(scope="module")
def plan() -> wb.Plan:
    """A small model with a name."""
    return wb.Plan.hybrid(wb.trace("mobilenet_v3_small", input_shape=(3, 32, 32)), world_size=2)


@pytest.mark.slow
def test_a_user_s_own_module_trains_and_goes_on_under_another_plan(cluster, experiment):
    run = cluster.train(experiment, module=NET).wait(LONG_S)
    assert run.state == "finished"
    assert run.metrics["loss"].iloc[-1] < run.metrics["loss"].iloc[0]
    assert run.evaluation["accuracy"] > 0.5
    assert run.checkpoint is not None
    assert run.checkpoint.is_relative_to(run.directory)
    assert wb.Experiment.load(run.directory / "experiment.toml") == experiment
    home = copy.deepcopy(NET)
    home.load_state_dict(run.state_dict())
    shape = experiment.plan.graph.input_shape
    digits = open_data(experiment.data, (Input(shape),), 10, "test")
    images, labels = digits.batch(torch.arange(len(digits)))
    right = (home.eval()(images).argmax(1) == labels).float().mean()
    assert right.item() == pytest.approx(run.evaluation["accuracy"])
    other = experiment.replace(plan=wb.Plan.data_parallel(experiment.plan.graph, 2), steps=33)
    resumed = cluster.train(other, resume=run).wait(LONG_S)
    assert resumed.metrics["step"].tolist() == [30, 30, 31, 31, 32, 32]


def ten_times(outputs, targets):
    return 10 * nn.functional.cross_entropy(outputs, targets, reduction="none")


@pytest.mark.slow
def test_a_run_is_repeated_from_its_folder(cluster, experiment):
    run = cluster.train(experiment.replace(loss=ten_times, steps=5)).wait(LONG_S)
    found = wb.Run.load(run.directory)
    assert {"ten_times"} <= {each.name for each in found.environment.sources}
    with pytest.raises(ModelError, match="Sequential is a module of your own, and the text of"):
        cluster.train(found.experiment.replace(loss=ten_times), module=NET)
    initial = found.directory / "initial.safetensors"
    with pytest.raises(ModelError, match="does not hold its structure"):
        cluster.train(found.experiment.replace(loss=ten_times), weights=initial)
    other = copy.deepcopy(NET)
    nn.init.zeros_(other[1].weight)
    graph = wb.trace(other, input_shape=(1, 8, 8))
    again = wb.Experiment.load(found.directory / "experiment.toml", graph).replace(loss=ten_times)
    repeated = cluster.train(again, weights=initial).wait(LONG_S)
    assert repeated.metrics["loss"].tolist() == run.metrics["loss"].tolist()
    both = zip(repeated.state_dict().values(), run.state_dict().values(), strict=True)
    assert all(map(torch.equal, *zip(*both, strict=True)))
    assert initial.read_bytes() == (repeated.directory / "initial.safetensors").read_bytes()


@pytest.mark.slow
def test_a_run_of_a_model_by_name_begins_with_what_its_seed_gives(cluster, plan):
    experiment = wb.Experiment(plan=plan, data="synthetic", optimizer="sgd", steps=1)
    run = cluster.train(experiment.replace(batch_size=8)).wait(LONG_S)
    assert not (run.directory / "initial.safetensors").exists()


@pytest.mark.slow
def test_a_stopped_run_goes_on_as_if_nothing_had_been(cluster, experiment):
    experiment = experiment.replace(steps=400, evaluate_every=None)
    straight = cluster.train(experiment, module=NET).wait(LONG_S)
    run = cluster.train(experiment, module=NET)
    unsubscribe = run.subscribe(lambda rows: run.stop() if rows else None)
    run.wait(LONG_S)
    unsubscribe()
    assert run.state == "stopped"
    assert 0 < run.metrics["step"].max() < 399
    assert run.resume() is run
    assert run.wait(LONG_S).state == "finished"
    columns = ["step", "rank", "loss"]
    assert run.metrics[columns].equals(straight.metrics[columns])
    assert run.evaluation == straight.evaluation
    assert cluster.occupied == {}


@pytest.mark.slow
def test_gradients_in_flight_survive_a_stop(cluster, experiment):
    late = experiment.replace(sync=wb.Pipelined(width=3, warmup=2), steps=200)
    straight = cluster.train(late, module=NET).wait(LONG_S)
    run = cluster.train(late, module=NET)
    unsubscribe = run.subscribe(lambda rows: run.stop() if rows else None)
    run.wait(LONG_S)
    unsubscribe()
    assert run.resume().wait(LONG_S).state == "finished"
    columns = ["step", "rank", "loss"]
    assert run.metrics[columns].equals(straight.metrics[columns])
    assert run.evaluation == straight.evaluation
    assert straight.notes == [
        f"step {step} moved no weights: it filled the pipeline" for step in (2, 3)
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    "sync",
    [wb.Pipelined(algorithm="ring"), wb.Pipelined(algorithm="backend"), wb.ParameterServer()],
    ids=["ring", "backend", "server"],
)
def test_a_rank_that_vanishes_in_an_all_reduce_loses_no_step(cluster, experiment, sync):
    """Killed after its first row; goes on from the newest checkpoint, as if nothing had been."""
    data_parallel = wb.Plan.data_parallel(experiment.plan.graph, 2)
    experiment = experiment.replace(
        plan=data_parallel, sync=sync, steps=600, checkpoint_every=50, evaluate_every=None
    )
    straight = cluster.train(experiment, module=NET).wait(LONG_S)
    run, victim = cluster.train(experiment, module=NET), cluster.pids[1]

    def kill(rows):
        if rows and not run.notes:
            with suppress(ProcessLookupError):
                os.kill(victim, signal.SIGKILL)

    unsubscribe = run.subscribe(kill)
    assert run.wait(LONG_S).state == "finished"
    unsubscribe()
    assert f"rank 1 (pid {victim}) died: its process was ended by SIGKILL" in run.notes[0]
    columns = ["step", "rank", "loss"]
    assert run.metrics[columns].equals(straight.metrics[columns])


@pytest.mark.slow
def test_a_run_loses_no_step_where_the_store_dies_in_which_ranks_meet(cluster, experiment):
    """It goes on without, or from its newest checkpoint; the next run has another."""
    data_parallel = wb.Plan.data_parallel(experiment.plan.graph, 2)
    experiment = experiment.replace(
        plan=data_parallel, steps=200, checkpoint_every=50, evaluate_every=None
    )
    straight = cluster.train(experiment, module=NET).wait(LONG_S)
    run, store = cluster.train(experiment, module=NET), holder(cluster.folder / RENDEZVOUS)
    assert store is not None

    def kill(rows):
        if rows:
            store.send(signal.SIGKILL)

    unsubscribe = run.subscribe(kill)
    assert run.wait(LONG_S).state == "finished"
    unsubscribe()
    columns = ["step", "rank", "loss"]
    assert run.metrics[columns].equals(straight.metrics[columns])
    after = cluster.train(experiment, module=NET).wait(LONG_S)
    assert after.metrics[columns].equals(straight.metrics[columns])
    assert holder(cluster.folder / RENDEZVOUS) != store


@pytest.mark.slow
def test_a_user_s_own_module_is_known_where_it_was_traced(cluster, experiment):
    short = experiment.replace(steps=2)
    given = cluster.train(short, module=NET).wait(LONG_S)
    assert cluster.train(short).wait(LONG_S).metrics["loss"].equals(given.metrics["loss"])
    elsewhere = short.replace(plan=pickle.loads(pickle.dumps(short.plan)))
    assert elsewhere == short
    with pytest.raises(ModelError, match="Sequential was not traced in this process"):
        cluster.train(elsewhere)
    assert cluster.occupied == {}


@pytest.mark.slow
def test_a_split_is_proved_exact(cluster, plan, capsys):
    found = cluster.verify(plan, steps=1)
    assert found.of("output").error < found.tolerance("output")
    assert {difference.what for difference in found.differences} >= {"gradient", "weight"}
    said = "verifying mobilenet_v3_small: unsplit model, 2 ranks"
    assert said in capsys.readouterr().out
    assert not list(cluster.folder.glob("reference-*"))


@pytest.mark.slow
def test_an_interrupted_verification_leaves_the_cluster_usable(cluster, plan):
    interrupt_inside(Job.watch)
    with pytest.raises(KeyboardInterrupt):
        cluster.verify(plan, steps=100_000)
    assert cluster.occupied == {}
    assert cluster.verify(plan, steps=1, precision="fp32").precision == "fp32"


@pytest.mark.slow
def test_the_model_is_made_once(cluster, plan):
    run = wb.Experiment(
        plan=plan, data="digits", batch_size=8, optimizer=wb.SGD(lr=0.1), steps=1, seed=3
    )
    made = []
    for _ in range(2):
        cluster.train(run).wait(LONG_S)
        [weights] = cluster.folder.glob("weights/*-seed3.safetensors")
        made.append(weights.stat().st_mtime_ns)
    assert made[0] == made[1]


def test_weights_that_cannot_be_made_are_told(cluster, plan):
    weights = cluster.folder / "weights"
    aside = weights.rename(weights.with_name("aside")) if weights.exists() else None
    weights.write_text("where a folder should be")
    run = cluster.train(
        wb.Experiment(plan=plan, data="digits", optimizer=wb.SGD(lr=0.1), steps=1, seed=5)
    )
    with pytest.raises(ClusterError, match="the initial weights could not be made: "):
        run.wait(LONG_S)
    assert run.state == "failed"
    weights.unlink()
    if aside is not None:
        aside.rename(weights)
