"""One cluster and one trained run for all tests of what is kept of runs."""

from collections.abc import Iterator

import pytest
from torch import nn

import workbench as wb

LONG_S = 120.0
NET = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


@pytest.fixture(scope="package")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[wb.Cluster]:
    with wb.Cluster(2, directory=tmp_path_factory.mktemp("runs"), timeout=60.0) as cluster:
        yield cluster


@pytest.fixture(scope="package")
def experiment() -> wb.Experiment:
    plan = wb.Plan.hybrid(wb.trace(NET, input_shape=(1, 8, 8)), world_size=2)
    optimizer = wb.SGD(lr=0.1)
    return wb.Experiment(
        plan=plan, batch_size=64, optimizer=optimizer, steps=6, trace_every=3, evaluate_every=4
    )


@pytest.fixture(scope="package")
def finished(cluster: wb.Cluster, experiment: wb.Experiment) -> wb.Run:
    """A run that was trained to its end."""
    run = cluster.train(experiment)
    run.set_lr(0.05)
    return run.wait(LONG_S)


@pytest.fixture(autouse=True)
def own_task(request: pytest.FixtureRequest) -> Iterator[None]:
    """`train` has the cluster run fake sessions; the next test's runs are real ones again."""
    yield
    if "cluster" in request.fixturenames:
        vars(request.getfixturevalue("cluster")).pop("task", None)
