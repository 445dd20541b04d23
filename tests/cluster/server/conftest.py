"""A light cluster for the tests of the job server."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.server.fake_cluster import FakeCluster


@pytest.fixture
def fake(tmp_path: Path) -> Iterator[FakeCluster]:
    """Two engines, an assistant and a server."""
    cluster = FakeCluster(tmp_path / "cluster")
    yield cluster
    cluster.close()
