"""Tables of clusters that are stores alone, closed when a test ends."""

import pytest

from tests.widgets.tables.kit import FakeCluster
from workbench.bench.front_end import FrontEnd


@pytest.fixture
def cluster(tmp_path):
    return FakeCluster(tmp_path)


@pytest.fixture
def board():
    """`board(JobTable, cluster)` makes one."""
    made = []

    def make(kind, cluster, **state):
        made.append(kind(cluster, **state))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture
def show(page, problems, board):
    """`show(JobTable, cluster)` shows one."""

    def make(kind, cluster, theme="light", **state):
        return FrontEnd(page, board(kind, cluster, **state), theme)

    return make
