"""Runs that have ended, and whose cluster is gone, for all tests of what is kept of runs."""

import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
from torch import nn

import workbench as wb
from tests.client.conftest import WEIGHTS
from tests.plan.graphs import mlp
from tests.store.test_messages import experiment
from workbench.client import cluster as cluster_module
from workbench.client.run import submitting

LONG_S = 120.0
NET = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


@dataclass(frozen=True)
class Past:
    """Runs of a cluster that has ended.

    Attributes:
        finished: six steps of a module, some of them traced.
        other: the same under another plan and optimizer.
        again: two steps more of the first, which was read from its folder.
        failed: runs that failed, by their fake session.
    """

    finished: wb.Run
    other: wb.Run
    again: wb.Run
    failed: dict[str, wb.Run]


@pytest.fixture(scope="session")
def past(tmp_path_factory: pytest.TempPathFactory) -> Past:
    plan = wb.Plan.hybrid(wb.trace(NET, input_shape=(1, 8, 8)), world_size=2)
    first = wb.Experiment(
        plan=plan,
        data="digits",
        batch_size=64,
        optimizer=wb.SGD(lr=0.1),
        steps=6,
        trace_every=3,
        evaluate_every=4,
    )
    second = first.replace(
        plan=wb.Plan.data_parallel(plan.graph, 2), optimizer=wb.AdamW(lr=0.01), evaluate_every=None
    )
    with wb.Cluster(2, directory=tmp_path_factory.mktemp("past"), timeout=60.0) as cluster:
        # The first run waits for engines until its rate has been asked for, however fast it is.
        before = _faked(cluster, "slowly", steps=100_000)
        finished, other = cluster.train(first), cluster.train(second)
        finished.set_lr(0.05)
        before.stop()
        loaded = wb.Run.load(finished.wait(LONG_S).directory)
        again = cluster.train(first.replace(steps=8), resume=loaded).wait(LONG_S)
        other.wait(LONG_S)
        failed = {
            name: _faked(cluster, name) for name in ("last_rank_raises", "diverges", "all_raise")
        }
        assert all(run.join(LONG_S) for run in failed.values())
    return Past(finished, other, again, failed)


def _faked(cluster: wb.Cluster, session: str, steps: int = 5) -> wb.Run:
    """A run of a fake session, which has no model, so nobody makes its weights."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cluster, "task", f"tests.client.fake_session:{session}")
        for module in (submitting, cluster_module):
            patch.setattr(module, "module_values", lambda *_: WEIGHTS)
        plan = wb.Plan.data_parallel(mlp(4, 4), 2)
        return cluster.train(experiment(plan).replace(steps=steps))


@pytest.fixture
def finished(past: Past) -> wb.Run:
    return past.finished


@pytest.fixture
def moved(finished: wb.Run, tmp_path: Path) -> Path:
    """The finished run's folder, at another place."""
    return shutil.copytree(finished.directory, tmp_path / "elsewhere")
