"""A cluster for the tests that need one, and a look at what it leaves behind."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.client import leftovers
from tests.client.fake_job import Job
from tests.plan.graphs import mlp
from tests.store.test_messages import experiment
from workbench.client import cluster as cluster_module
from workbench.client.cluster import Cluster
from workbench.client.run import submitting
from workbench.client.run.run import Run
from workbench.plan import Plan

WEIGHTS = Path(__file__)
"""Any file: no fake session reads it."""


@pytest.fixture(scope="session")
def lasting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two engines for the tests of all modules; nothing of them may be left."""
    directory = tmp_path_factory.mktemp("runs")
    with Cluster(2, directory=directory, timeout=60.0) as cluster:
        yield cluster
    assert not list(directory.glob(".cluster-*"))
    assert not leftovers.of(cluster.folder)


@pytest.fixture(scope="module")
def cluster(lasting: Cluster) -> Iterator[Cluster]:
    """Two engines; the tests of a module leave both of them there, and free."""
    task, devices = lasting.task, lasting.devices
    yield lasting
    lasting.task = task
    assert (lasting.occupied, lasting.dead, lasting.devices) == ({}, (), devices)


@pytest.fixture
def train(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Run]:
    """`train("slowly", steps=7)` -> a run of that fake session on both engines."""

    def train(session: str, *, steps: int = 5, ranks: int = 2) -> Run:
        # Fake sessions have no model, so nobody makes its weights.
        for module in (submitting, cluster_module):
            monkeypatch.setattr(module, "module_values", lambda *_: WEIGHTS)
        cluster.task = f"tests.client.fake_session:{session}"
        plan = Plan.data_parallel(mlp(4, 4), ranks)
        return cluster.train(experiment(plan).replace(steps=steps))

    return train


@pytest.fixture
def start(tmp_path: Path) -> Callable[..., Run]:
    """`start(job)` -> the run; `start.next_job` is what it goes on with when it is resumed."""

    def start(job: Job) -> Run:
        plan = Plan.data_parallel(mlp(4, 4), 2)
        return Run(experiment(plan), tmp_path, job, lambda _run: start.next_job)

    return start
