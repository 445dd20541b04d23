"""Ranks for the tests: a cluster of engines, started once, as the notebooks use it."""

import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

import ipyparallel as ipp
import pytest

if TYPE_CHECKING:
    from tests.ranks import Ranks

ENGINES = 4


@pytest.fixture(scope="session")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ipp.Client]:
    """Four engines, each on one core, which can import whatever pytest can."""
    profile = str(tmp_path_factory.mktemp("ipython"))
    path = [os.path.abspath(entry) for entry in sys.path]
    with ipp.Cluster(
        n=ENGINES, profile_dir=profile, controller_args=["--nodb"], delay=0, log_level=40
    ) as client:
        client.wait_for_engines(ENGINES, timeout=120)
        settled = [client[engine].apply_async(_settle, path, engine) for engine in client.ids]
        for answer in settled:
            answer.get(timeout=60)
        yield client


def _settle(path: list[str], index: int) -> None:
    import os
    import sys

    sys.path[:] = path
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[index % len(cores)]})


@pytest.fixture(scope="session")
def on_ranks(engines: ipp.Client) -> "Ranks":
    """`on_ranks(n, f, *args)` -> [f(world, *args) on rank 0, on rank 1, ...]."""
    from tests.ranks import Ranks

    return Ranks(engines)
