"""Experiments that are too large for a message to the job server, on real engines."""

import random

import pytest
from torch import nn

import workbench as wb
from workbench.hosts.processes import until
from workbench.store import messages
from workbench.store.errors import ClusterError
from workbench.store.record import LARGEST_MESSAGE_BYTES

LONG_S = 120.0
CLASSES = 8_000

NET = nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, CLASSES))
GRAPH = wb.trace(NET, input_shape=(1, 4, 4), num_classes=CLASSES)
WHOLE, HALVES = wb.Plan.data_parallel(GRAPH, 2), wb.Plan.hybrid(GRAPH, 2)


@pytest.fixture(scope="module")
def experiment():
    """The weight of each class is some bytes that no compression saves."""
    draw = random.Random(0)
    found = wb.Experiment(
        plan=WHOLE,
        data=wb.Synthetic(samples=64, classes=CLASSES),
        loss=wb.CrossEntropy(weight=tuple(draw.uniform(0.5, 2.0) for _ in range(CLASSES))),
        batch_size=8,
        optimizer=wb.SGD(lr=0.1),
        steps=2,
    )
    assert len(messages.pack(found, bytes(32))) > LARGEST_MESSAGE_BYTES
    return found


@pytest.fixture
def endless(cluster, experiment):
    """A run that makes steps, and is stopped in the end."""
    run = cluster.train(experiment.replace(steps=10**6), module=NET)
    assert until(lambda: run.state == "running", LONG_S, 0.02)
    yield run
    run.stop()
    assert run.join(LONG_S)


def files(cluster) -> set[str]:
    return {path.name for path in (cluster.folder / "experiments").glob("*")}


def test_it_trains(cluster, experiment):
    run = cluster.jobs.submit(experiment, module=NET)
    assert run.wait(LONG_S).state == "finished"
    assert [outcome.step for outcome in run.outcomes] == [2, 2]
    assert len(cluster.link.store.job(run.id).packed) < 1000
    assert cluster.link.store.ledger(run.id)["sent"].bytes < 12_000
    assert {wb.Run.load(run.directory).experiment, cluster.jobs[run.id].experiment} == {experiment}
    assert not [path for path in run.directory.rglob("*") if path.suffix == ".packed"]


@pytest.mark.slow
def test_it_is_verified(cluster, experiment):
    assert cluster.verify(experiment.replace(plan=HALVES), module=NET).exact


@pytest.mark.slow
def test_a_sweep_tells_them_apart(cluster, experiment):
    sweep = cluster.jobs.sweep(experiment, module=NET, lr=[0.1, 0.01]).wait(LONG_S)
    table = sweep.table()
    assert table["state"].tolist() == ["finished"] * 2
    assert table["lr"].tolist() == [0.1, 0.01]


@pytest.mark.slow
def test_it_goes_on_under_another_plan_and_is_resumed_under_it(cluster, endless):
    endless.replan(HALVES).wait(LONG_S)
    endless.stop()
    endless.wait(LONG_S)
    done = int(endless.metrics["step"].max())
    endless.resume()
    assert until(lambda: endless.metrics["step"].max() > done, LONG_S, 0.02)
    assert endless.experiment.plan == cluster.jobs[endless.id].experiment.plan == HALVES


@pytest.mark.slow
def test_the_assistant_makes_its_weights(cluster, experiment, monkeypatch):
    """Of a model by name, of which the job server asks for them with the run's own message."""
    monkeypatch.setattr(messages, "LARGEST_INLINE_BYTES", 100)
    graph = wb.trace("mobilenet_v3_small", input_shape=(3, 32, 32), num_classes=10)
    named = wb.Experiment(
        plan=wb.Plan.data_parallel(graph, 2),
        data=wb.Synthetic(samples=8),
        batch_size=4,
        optimizer=wb.SGD(lr=0.1),
        steps=1,
    )
    run = cluster.train(named).wait(LONG_S)
    assert (run.state, len(cluster.link.store.job(run.id).packed) < 1000) == ("finished", True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), "is damaged"),
        (lambda path: path.unlink(), "cannot be read: No such file"),
    ],
    ids=["damaged", "missing"],
)
def test_ranks_refuse_what_is_not_what_was_submitted(cluster, endless, harm, said):
    """And whoever asks for the run here; what goes on as it was is written anew."""
    endless.pause()
    assert until(lambda: endless.state == "paused", LONG_S, 0.02)
    before = files(cluster)
    (path,) = [each for each in (cluster.folder / "experiments").iterdir()
               if str(each).encode() in cluster.link.store.job(endless.id).packed]  # fmt: skip
    harm(path)
    endless.resume()
    with pytest.raises(ClusterError, match=f"{path.name} {said}.*submit it again"):
        endless.wait(LONG_S)
    assert endless.state == "failed"
    with pytest.raises(ClusterError, match=f"{path.name} {said}"):
        _ = cluster.jobs[endless.id]
    done = int(endless.metrics["step"].max())
    endless.resume()
    assert until(lambda: endless.metrics["step"].max() > done, LONG_S, 0.02)
    assert files(cluster) == before


def test_equal_ones_have_one_file_and_small_ones_none(cluster, experiment):
    sent = cluster.link.packed(experiment)
    before = files(cluster)
    assert before
    assert cluster.link.packed(experiment) == sent
    small = experiment.replace(loss=None)
    run = cluster.train(small, module=NET).wait(LONG_S)
    assert cluster.link.store.job(run.id).packed == messages.pack(small, cluster.link.key)
    assert files(cluster) == before


@pytest.mark.slow
def test_nothing_of_it_is_left_when_its_cluster_ends(experiment, tmp_path):
    alone = experiment.replace(plan=wb.Plan.data_parallel(GRAPH, 1))
    with wb.Cluster(1, directory=tmp_path) as cluster:
        run = cluster.train(alone, module=NET).wait(LONG_S)
        assert len(files(cluster)) == 1
    assert [path.name for path in tmp_path.iterdir()] == [run.directory.name]
