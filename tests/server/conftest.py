"""A light cluster for the tests of the job server, shared by them."""

import time
from collections.abc import Iterator

import pytest

from tests.server.fake_cluster import WITHIN_S, FakeCluster


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeCluster]:
    """Two engines, an assistant and a server."""
    cluster = FakeCluster(tmp_path_factory.mktemp("cluster"))
    yield cluster
    cluster.close()


@pytest.fixture
def fake(shared: FakeCluster) -> FakeCluster:
    """The same, with nothing to do, and every engine there."""
    for job in shared.store.jobs():
        if not job.has_ended:
            shared.store.command("cancel", job.id)
    deadline = time.monotonic() + WITHIN_S
    while {engine.state for engine in shared.store.engines()} != {"idle"}:
        assert time.monotonic() < deadline, shared.store.engines()
        time.sleep(0.02)
    return shared
