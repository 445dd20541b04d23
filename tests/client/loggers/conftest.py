"""A run as loggers see it, whose rows come when the test says so."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.client.fake_session import row
from tests.plan.graphs import mlp
from tests.store.test_messages import experiment
from workbench.client.run.rows import Rows
from workbench.plan import Plan


class Played:
    """A run of two ranks."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.experiment = experiment(Plan.data_parallel(mlp(4, 4), 2))
        self.rows, self.notes = Rows(), []
        self.state, self.evaluation = "starting", {}
        self.told: list[Callable] = []

    def subscribe(self, feed: Callable) -> None:
        self.told.append(feed)
        feed([])

    def step(self, number: int, *ranks: int, **values: float) -> None:
        self.state = "running"
        for rank in ranks or (0, 1):
            self.rows.extend([{**row(number, rank), **values, "wait_s": 0.5 + rank}])
        self.tell()

    def end(self, state: str = "finished", **evaluation: float) -> None:
        self.state, self.evaluation = state, evaluation
        self.tell()

    def tell(self) -> None:
        for feed in self.told:
            feed([])


@pytest.fixture
def played(tmp_path: Path) -> Played:
    directory = tmp_path / "20260101-000000-Toy"
    directory.mkdir()
    return Played(directory)
