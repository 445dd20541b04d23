"""How ipyparallel starts a controller and engines for us.

Measured with ipyparallel 9.2 on 4 cores, torch included: 4 engines are ready after 4 s instead
of 7.5 s, in 6 processes instead of 17, because

    an engine is registered at its first heartbeat, so the heart beats every 0.5 s, not 3 s;
    engines start together with the controller and import torch while it starts;
    schedulers are threads of the controller, not 7 processes;
    engines have no nanny: on this host we signal and watch them ourselves.
"""

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from ipyparallel.cluster.launcher import (
    LocalControllerLauncher,
    LocalEngineLauncher,
    LocalEngineSetLauncher,
)
from traitlets import List, Unicode

from workbench.store.cluster_spec import Site
from workbench.store.device import Device
from workbench.store.rank_files import CARRIED

SPAWN = Path(__file__).with_name("spawn.py")
PRELOAD = ("torch", "workbench.engine.calls", "workbench.train.loop.session")
CONTROLLER_OPTIONS = (
    "--nodb",  # else the hub keeps every message in memory
    "--usethreads",
    "--HeartMonitor.period=500",
    # Whether an engine is alive we see ourselves; the hub's opinion must not come in between.
    "--HeartMonitor.max_heartmonitor_misses=1000000",
    # One that takes another's place has the same ports and knows the same engines.
    "--IPController.reuse_files=True",
    "--IPController.restore_engines=True",
)


def command(module: str, *options: str) -> list[str]:
    """The command line that runs a module under the guard of `spawn.py`."""
    return [sys.executable, "-P", str(SPAWN), module, *options]


def guarded(scratch: Path) -> dict[str, str]:
    """The environment of every process that we start."""
    return {
        "WORKBENCH_PARENT": str(os.getpid()),
        "IPYTHONDIR": str(scratch / "ipython"),  # nobody's own start-up files and settings
        # What can be imported here can be imported there: the user's own modules too.
        "PYTHONPATH": os.pathsep.join(os.path.abspath(entry) for entry in sys.path),
    }


def engine_environment(
    index: int, device: Device, site: Site, scratch: Path, connection: Path
) -> Mapping[str, str]:
    """What makes one engine itself; set before it imports anything."""
    own = {
        **guarded(scratch),
        **site.environment,
        "WORKBENCH_ENGINE": str(index),
        "WORKBENCH_CORES": ",".join(map(str, device.cores)),
        "WORKBENCH_PRELOAD": ",".join(PRELOAD),
        "WORKBENCH_CONNECT": str(connection),
        "CUDA_VISIBLE_DEVICES": device.gpu,
        "OMP_NUM_THREADS": str(device.threads),
        # Threads that spin while they wait for each other are up to 400 times slower when
        # anything else wants one of their cores (measured: small convolutions, 4 threads).
        "OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "passive"),
        # torch looks up the name of everybody who connects to a store, and a lost query would
        # take five seconds each time.
        "RES_OPTIONS": os.environ.get("RES_OPTIONS", "timeout:1 attempts:1"),
        # The memory meter sees tensors freed that it never saw made, and torch would warn.
        "TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR"),
    }
    return {**own, CARRIED: ",".join(own)} if site.enter else own


class GuardedController(LocalControllerLauncher):  # type: ignore[misc]
    """A controller that ends when this process does."""

    def find_args(self) -> list[str]:
        """The command line."""
        return command("ipyparallel.controller", *CONTROLLER_OPTIONS, *self.controller_args)

    def get_env(self) -> dict[str, str]:
        """What is added to the environment."""
        return {**super().get_env(), **guarded(Path(self.profile_dir).parent)}


class GuardedEngine(LocalEngineLauncher):  # type: ignore[misc]
    """An engine that ends when this process does; its environment comes from its set."""

    def find_args(self) -> list[str]:
        """The command line."""
        options = ("--IPEngine.enable_nanny=False", *self.engine_args)
        return [*self.parent.enter, *command("ipyparallel.engine", *options)]


class GuardedEngines(LocalEngineSetLauncher):  # type: ignore[misc]
    """A set of one guarded engine, because only sets can be given an environment of their own."""

    launcher_class = GuardedEngine
    enter = List(Unicode(), help="what the engine's command line begins with; see `Site`")
