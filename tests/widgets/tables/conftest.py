"""Tables of clusters that are stores alone."""

import pytest

from tests.widgets.tables.kit import FakeCluster


@pytest.fixture
def cluster(tmp_path):
    return FakeCluster(tmp_path)


@pytest.fixture
def board(made):
    """`board(JobTable, cluster)` makes one."""
    return made
