"""The controller and the engines of a cluster, as processes: ipyparallel's launchers, guarded."""

import itertools
import json
import logging
import os
import signal
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import ipyparallel

from workbench.hosts.processes import ending
from workbench.store.cluster_spec import Spec, connection_file, identity
from workbench.store.rank_files import ENDINGS
from workbench.supervisor.launch import GuardedController, GuardedEngines, engine_environment

LAST_WORDS = 2000  # characters


@dataclass(frozen=True)
class Ended:
    """A process that is gone.

    Attributes:
        pid: its id.
        how: in words, "was ended by SIGKILL".
        said: the last that it wrote.
    """

    pid: int
    how: str
    said: str


class Fleet:
    """Starts processes, whose parent this one is, and says at once when one has ended.

    To be used on one thread, that of an event loop: the kernel tells children when the thread
    that started them ends.

    Args:
        folder: the cluster's.
        spec: what it is.
        on_engine: is told of an engine that has ended.
        on_controller: is told when the controller has.
        ports: for the controller to listen on; none: any.
    """

    def __init__(
        self,
        folder: Path,
        spec: Spec,
        on_engine: Callable[[Ended], None],
        on_controller: Callable[[Ended], None],
        ports: Sequence[int] = (),
    ) -> None:
        self._folder, self._spec, self._ports = folder, spec, ports
        self._on_engine, self._on_controller = on_engine, on_controller
        self._numbers = itertools.count()
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

    async def start_engine(self, index: int) -> int:
        """Starts an engine, which finds its controller by itself; returns its process id."""
        name = f"engine-{index}-{next(self._numbers)}"
        site, connection = self._spec.sites[index], connection_file(self._folder, "engine")
        device = self._spec.devices[index]
        await self._ipp.start_engines(
            n=1,
            engine_set_id=name,
            enter=list(site.enter),
            environment=engine_environment(index, device, site, self._folder, connection),
        )
        launcher = self._ipp.engines[name]
        (engine,) = launcher.launchers.values()
        self.pids.add(engine.pid)
        launcher.on_stop(partial(self._engine_ended, name, launcher))
        return int(engine.pid)

    def kill(self) -> None:
        """Ends everything, now."""
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
