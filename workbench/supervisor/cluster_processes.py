"""The processes of a cluster, guarded; controller and engines by ipyparallel's launchers.

Beside ipyparallel's own (9.2), fewer processes start, and engines are ready sooner, because

    an engine is registered at its first heartbeat, so the heart beats every 0.5 s, not 3 s;
    engines start together with the controller, forked from a process that has imported torch
    for all of them (`template.py`);
    schedulers are threads of the controller, not 7 processes;
    engines have no nanny: on this host we signal and watch them ourselves.
"""

import hmac
import itertools
import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import ipyparallel
import psutil
import zmq
from ipyparallel.cluster.launcher import (
    LocalControllerLauncher,
    LocalEngineLauncher,
    LocalEngineSetLauncher,
)
from traitlets import Instance, List, Unicode
from zmq.utils import z85

from workbench.hosts.processes import MARK, ending
from workbench.plan.extension.sealed import KEY_FILE
from workbench.store.cluster_spec import (
    KEY,
    ClusterSpec,
    EngineDevice,
    Site,
    connection_file,
    identity,
    key_of,
)
from workbench.store.process import CARRIED, ENDINGS
from workbench.store.tasks import place_of
from workbench.supervisor.starting import LOG
from workbench.supervisor.template import EngineTemplate, can_fork, network_of

SPAWN = Path(__file__).with_name("spawn.py")
PRELOAD = (
    "torch",
    "torch._dynamo",  # which the first optimizer imports: another 2 s
    *dict.fromkeys(place_of(task)[0] for task in ("run", "train")),
    "ipyparallel.engine.app",
)
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


def engine_command(*options: str) -> list[str]:
    """The command line of an engine on this host."""
    return command("ipyparallel.engine", "--IPEngine.enable_nanny=False", *options)


def guarded(scratch: Path) -> dict[str, str]:
    """The environment of every process that we start."""
    return {
        "WORKBENCH_PARENT": str(os.getpid()),
        "IPYTHONDIR": str(scratch / "ipython"),  # nobody's own start-up files and settings
        # What can be imported here can be imported there: the user's own modules too.
        "PYTHONPATH": os.pathsep.join(os.path.abspath(entry) for entry in sys.path),
    }


def curve_environment(folder: Path) -> dict[str, str]:
    """What has a controller encrypt all that it sends and takes, and refuse whom it cannot know.

    Its keys are the same as long as the cluster's folder is, so that engines and clients know the
    one that takes another's place. Its public key tells who may talk to it: it stands in connection
    files alone, which only their owner reads, and never goes over a connection (CurveZMQ, RFC 26).
    """
    secret = z85.encode(hmac.digest(key_of(folder), b"curve", "sha256"))
    return {
        "IPP_ENABLE_CURVE": "1",
        "IPP_CURVE_SECRETKEY": secret.decode(),
        "IPP_CURVE_PUBLICKEY": zmq.curve_public(secret).decode(),
    }


def engine_environment(
    index: int, device: EngineDevice, site: Site, scratch: Path, connection: Path
) -> Mapping[str, str]:
    """What makes one engine itself; set before it imports anything."""
    own = {
        **guarded(scratch),
        **site.environment,
        "WORKBENCH_ENGINE": str(index),
        KEY_FILE: str(scratch / KEY),
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
        folder = Path(self.profile_dir).parent
        return {**super().get_env(), **guarded(folder), **curve_environment(folder)}


class GuardedEngine(LocalEngineLauncher):  # type: ignore[misc]
    """An engine that ends when this process does; its environment comes from its set."""

    def find_args(self) -> list[str]:
        """The command line."""
        return [*self.parent.enter, *engine_command(*self.engine_args)]

    def start(self) -> None:
        """Forks the engine where its set has a template for it, and else starts it."""
        template, environment = self.parent.template, {**os.environ, **self.get_env()}
        if template is None or not template.takes(self.args, environment):
            super().start()
            return
        self.pid = template.fork(self.args, environment, self.output_file)
        self.process = psutil.Process(self.pid)
        self.notify_start(self.pid)
        self._start_waiting()


class GuardedEngines(LocalEngineSetLauncher):  # type: ignore[misc]
    """A set of one guarded engine, because only sets can be given an environment of their own."""

    launcher_class = GuardedEngine
    enter = List(Unicode(), help="what the engine's command line begins with; see `Site`")
    template = Instance(EngineTemplate, allow_none=True, help="None: it is started, not forked")


LAST_WORDS = 2000  # characters


@dataclass(frozen=True)
class Ended:
    """A process that is gone.

    Attributes:
        how: how it ended, in words: "was ended by SIGKILL".
    """

    pid: int
    how: str
    said: str


class ClusterProcesses:
    """Starts processes, whose parent this one is, and says at once when one has ended.

    To be used on one thread, that of an event loop: the kernel tells children when the thread
    that started them ends.

    Args:
        ports: ports for the controller to listen on; none: any.
    """

    def __init__(
        self,
        folder: Path,
        spec: ClusterSpec,
        on_engine: Callable[[Ended], None],
        on_controller: Callable[[Ended], None],
        ports: Sequence[int] = (),
    ) -> None:
        self._folder, self._spec, self._ports = folder, spec, ports
        self._on_engine, self._on_controller = on_engine, on_controller
        self._numbers = itertools.count()
        self._template: EngineTemplate | None = None
        self.pids: set[int] = set()  # of engines that run
        log = logging.getLogger(__name__)
        log.setLevel(logging.CRITICAL)  # ipyparallel tells nothing that we do not
        self._ipp = ipyparallel.Cluster(
            engines=GuardedEngines,
            controller=GuardedController,
            controller_ip=spec.address,
            cluster_id=identity(folder),
            profile_dir=str(folder / "profile"),
            load_profile=False,
            parent=None,
            log=log,
            delay=0,
            cluster_file="",  # it would be written after all is removed
            send_engines_connection_env=False,  # they start with the controller, not after it
            shutdown_atexit=False,  # their supervisor sees to it
        )

    async def start_controller(self) -> int:
        """Starts the controller; returns its process id."""
        self._ipp.controller = None
        # One that takes another's place has that one's ports, and wants more for itself.
        taken = ports_in(connection_file(self._folder, who) for who in ("client", "engine"))
        free = [port for port in self._ports if port not in taken]
        self._ipp.controller_args = [f"--IPController.ports={port}" for port in free]
        await self._ipp.start_controller()
        controller = self._ipp.controller
        controller.on_stop(lambda data: self._on_controller(_ended(data, controller)))
        return int(controller.pid)

    def make_template(self, on_ready: Callable[[], None]) -> None:
        """Starts what engines are forked from, unless all are on GPUs or on other hosts."""
        places = zip(self._spec.devices, self._spec.sites, strict=True)
        # What a driver has told a process before it forks is of no use behind that.
        plain = [
            index
            for index, (device, site) in enumerate(places)
            if not device.gpu and network_of(site.enter) is not None
        ]
        if plain and can_fork():
            cluster = {MARK: identity(self._folder), "IPP_PROFILE_DIR": self._ipp.profile_dir}
            environment = {**os.environ, **cluster, **self._environment(plain[0])}
            self._template = EngineTemplate(engine_command(), environment, on_ready)

    @property
    def are_ready(self) -> bool:
        """Whether engines can be started."""
        return self._template is None or not self._template.is_waited_for

    async def start_engine(self, index: int) -> int:
        """Starts an engine, which finds its controller by itself; returns its process id."""
        name = f"engine-{index}-{next(self._numbers)}"
        site = self._spec.sites[index]
        await self._ipp.start_engines(
            n=1,
            engine_set_id=name,
            enter=list(site.enter),
            template=self._template,
            environment=self._environment(index),
        )
        launcher = self._ipp.engines[name]
        (engine,) = launcher.launchers.values()
        self.pids.add(engine.pid)
        launcher.on_stop(partial(self._engine_ended, name, launcher))
        return int(engine.pid)

    def start_server(self) -> psutil.Process:
        """Starts `python -m <spec.server> FOLDER`; runs are not disturbed while there is none."""
        return self._start(command(self._spec.server, str(self._folder)))

    def start_rendezvous(self, port: int) -> psutil.Process:
        """Starts the store where ranks meet; it says itself, in the cluster's store, where it is.

        Args:
            port: the port to listen on; 0: any that is free.

        Raises:
            OSError: it cannot be started.
        """
        where = (self._spec.address, str(port), str(self._spec.timeout_s))
        started = command("workbench.supervisor.rendezvous", str(self._folder), *where)
        if self._template is not None:
            environment = self._template.shared_environment
            if self._template.takes(started, environment):
                log = str(self._folder / LOG)
                return psutil.Process(self._template.fork(started, environment, log))
        return self._start(started)

    def _start(self, started: Sequence[str]) -> psutil.Process:
        with (self._folder / LOG).open("ab") as log:
            return psutil.Popen(
                started,
                env={**os.environ, **guarded(self._folder), MARK: identity(self._folder)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # its guard ends its whole group
            )

    def _environment(self, index: int) -> Mapping[str, str]:
        device, site = self._spec.devices[index], self._spec.sites[index]
        connection = connection_file(self._folder, "engine")
        return engine_environment(index, device, site, self._folder, connection)

    def kill(self) -> None:
        """Ends everything, now."""
        if self._template is not None:
            self._template.close()
        for pid in [*self.pids, *([self._ipp.controller.pid] if self._ipp.controller else [])]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _engine_ended(self, name: str, launcher: Any, data: dict[str, Any]) -> None:
        self._ipp.engines.pop(name, None)
        (engine,) = data["engines"].values()
        self.pids.discard(engine["pid"])
        self._on_engine(_ended(engine, launcher))


def ports_in(files: Iterable[Path]) -> set[object]:
    """What a controller has written down, its ports among it."""
    found: set[object] = set()
    for path in files:
        with suppress(OSError, ValueError):  # there was none yet
            told = json.loads(path.read_text())
            for value in told.values():
                found.update(value if isinstance(value, list) else [value])
    return found


def _ended(data: dict[str, Any], launcher: Any) -> Ended:
    code = data["exit_code"]
    how = ENDINGS.get(code) or ending(code)
    return Ended(data["pid"], how, launcher.get_output()[-LAST_WORDS:])
