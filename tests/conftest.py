"""Ranks for the tests: a cluster of engines, started once, as the notebooks use it."""

import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ipyparallel as ipp
import pytest
import torch
from hypothesis import settings

if TYPE_CHECKING:
    from tests.ranks import Ranks

HERE = Path(__file__).parent
BOTH = [
    pytest.param(True, id="shared"),
    pytest.param(False, id="gloo", marks=pytest.mark.slow),
]

# How long an example takes is the host's affair.
settings.register_profile("workbench", deadline=None)
settings.load_profile("workbench")

# Most of what takes long waits most of the time; of more than two cores, one is left for what
# does not.
SIDE_BY_SIDE = 3
# What takes longest begins first, so that no process is left with it at the end.
LONGEST = ("notebooks", "bench", "client")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="also tests that are marked as slow")


def pytest_configure(config: pytest.Config) -> None:
    """Leaves slow tests out, unless all are asked for, or some by their names or marks."""
    if not (config.option.all or config.option.markexpr or _are_named(config)):
        config.option.markexpr = "not slow"


def _are_named(config: pytest.Config) -> bool:
    return config.args_source is pytest.Config.ArgsSource.ARGS


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Processes for `-n auto`; none but pytest's own for tests that were named, or with `-s`."""
    named = _are_named(config)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    cores = cores or 1
    workers = min(SIDE_BY_SIDE, cores - 1 if cores > 2 else cores)
    return workers if workers > 1 and not named and config.option.capture != "no" else 0


def pytest_collectstart(collector: pytest.Collector) -> None:
    """Modules that a test file makes when it is imported have the same weights in every run."""
    torch.manual_seed(0)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Processes get files in the order of collection."""
    if hasattr(config, "workerinput"):
        items.sort(key=_turn)


def _turn(item: pytest.Item) -> int:
    first, *_ = item.path.relative_to(HERE).parts
    return LONGEST.index(first) if first in LONGEST else len(LONGEST)


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Threads that share small tensors mostly wait for each other, on a busy host for long."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def own_surroundings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Clusters of tests are not entered where those of people are, and their ranks do not fight."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        patch.setenv("OMP_NUM_THREADS", "1")
        # torch looks up the name of every peer that connects: 127.0.0.1, but as IPv6, which no
        # hosts file knows. A name server that does not answer shall cost a second, not ten.
        patch.setenv("RES_OPTIONS", "timeout:1 attempts:1")
        yield


@pytest.fixture(scope="session")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ipp.Client]:
    """Four engines, which can import whatever pytest can."""
    from tests.engines import started

    with started(tmp_path_factory.mktemp("ipython")) as client:
        yield client


@pytest.fixture(scope="session")
def on_ranks(engines: ipp.Client) -> "Ranks":
    """`on_ranks(n, f, *args)` -> [f(world, *args) on rank 0, on rank 1, ...]."""
    from tests.ranks import Ranks

    return Ranks(engines)


@pytest.fixture(scope="session", params=BOTH)
def on_either(request: pytest.FixtureRequest, on_ranks: "Ranks") -> Callable[..., list[Any]]:
    """`on_ranks`, once through shared memory and once through gloo."""
    return partial(on_ranks, shared_memory=request.param)
