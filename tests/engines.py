"""The engines that tests run on, started as the notebooks start theirs."""

import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest.mock import patch

import ipyparallel as ipp
from traitlets.config import Config

ENGINES = 4


@contextmanager
def started(folder: Path) -> Iterator[ipp.Client]:
    """Four engines, which can import whatever this process can.

    Args:
        folder: where they keep their files.
    """
    path = os.pathsep.join(map(os.path.abspath, sys.path))
    cluster = ipp.Cluster(
        n=ENGINES,
        profile_dir=str(folder),
        controller_args=[
            "--nodb",
            "--usethreads",
            "--HeartMonitor.period=500",  # engines are there from their first heartbeat on
            "--HeartMonitor.max_heartmonitor_misses=1000000",  # a busy host is no dead engine
        ],
        delay=0,
        log_level=40,
        config=Config(
            # Nobody signals them through the controller, and at the end nothing is lost.
            LocalEngineSetLauncher={"engine_args": ["--IPEngine.enable_nanny=False"]},
            LocalEngineLauncher={"stop_seconds_until_kill": 0},
        ),
    )
    with ExitStack() as stack:
        # For the engines, and nothing else beside it, wherever they are started: a notebook's
        # kernel finds its folder without.
        with patch.dict(os.environ, {"PYTHONPATH": path, "PYTHONSAFEPATH": "1"}):
            client = stack.enter_context(cluster)
            client.wait_for_engines(ENGINES, timeout=120)
        yield client
