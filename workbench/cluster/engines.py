"""The processes of a cluster: started, called, signalled, watched, replaced, ended."""

import asyncio
import logging
import shutil
import signal
import threading
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ipyparallel
import psutil
from ipyparallel.serialize import pack_apply_message

from workbench.cluster.background import Background
from workbench.cluster.devices import Device
from workbench.cluster.engine import introduce
from workbench.cluster.errors import ClusterError, ControlMessageTooLarge
from workbench.cluster.ground import Ground
from workbench.cluster.launch import GuardedController, GuardedEngines, engine_environment
from workbench.cluster.processes import ending, is_alive, reap

START_WITHIN_S = 60.0
COLLECT_WITHIN_S = 0.3
LARGEST_MESSAGE_BYTES = 64 << 10


@dataclass(frozen=True)
class Engine:
    """One engine that is ready.

    Attributes:
        index: its place in the cluster, 0-based; kept when it is replaced.
        engine_id: ipyparallel's id, which is new after each replacement.
        pid: its process.
        device: what it computes on.
    """

    index: int
    engine_id: int
    pid: int
    device: Device


@dataclass
class Ledger:
    """How much went one way between the notebook and its engines."""

    messages: int = 0
    bytes: int = 0

    def add(self, num_bytes: int) -> None:
        """Counts one message."""
        self.messages += 1
        self.bytes += num_bytes


class Engines:
    """One engine for each device, under a controller of their own.

    Args:
        ground: what each engine computes on, and where it runs.
        scratch: a folder for connection files and logs; made here, removed by `stop`. Its name
            is the cluster's id, which no other cluster may have.
        at_once: the engines to start now; the others start when `ensure` asks for them.

    Raises:
        ClusterError: they did not come up; the text holds what they wrote.
    """

    def __init__(self, ground: Ground, scratch: Path, at_once: Collection[int]) -> None:
        self.ground, self.scratch, self.id = ground, scratch, scratch.name
        self.sent, self.received = Ledger(), Ledger()
        self._engines: dict[int, Engine] = {}
        self._seen: set[int] = set()  # ids of engines that ever registered
        self._sending, self._starting = threading.Lock(), threading.Lock()
        self._client: Any = None
        scratch.mkdir(mode=0o700, parents=True)
        log = logging.getLogger(__name__)
        log.setLevel(logging.CRITICAL)  # what matters is raised
        self._ipp = ipyparallel.Cluster(
            engines=GuardedEngines,
            controller=GuardedController,
            controller_ip=ground.address,
            cluster_id=self.id,
            profile_dir=str(scratch / "profile"),
            load_profile=False,
            parent=None,
            log=log,
            delay=0,
            send_engines_connection_env=False,  # they start with the controller, not after it
            shutdown_atexit=False,  # our owner sees to it
        )
        self._background = Background(f"engines of {self.id}")
        try:
            self._background.run(self._start(at_once))
        except BaseException:
            self.stop()
            raise

    def __getitem__(self, index: int) -> Engine:
        return self._engines[index]

    def call(self, index: int, function: Callable[..., Any], *arguments: Any) -> Any:
        """Calls an importable function on an engine.

        Returns:
            ipyparallel's AsyncResult.

        Raises:
            ControlMessageTooLarge: function and arguments take more than 64 KiB.
        """
        buffers = pack_apply_message(function, arguments, {})
        size = sum(memoryview(buffer).nbytes for buffer in buffers)
        if size > LARGEST_MESSAGE_BYTES:
            raise ControlMessageTooLarge(
                f"a message of {size:,} bytes to engine {index}: control messages have at most "
                f"{LARGEST_MESSAGE_BYTES:,}. Tensors, data and weights do not travel this way: "
                "let the ranks read them from a file, or make them from a seed"
            )
        with self._sending:  # the client numbers its messages without a lock
            self.sent.add(size)
            view = self._client[self._engines[index].engine_id]
            return view.apply_async(function, *arguments)

    def signal(self, index: int, number: signal.Signals) -> None:
        """Sends a signal to an engine's process; nothing happens where it has ended."""
        with suppress(KeyError, psutil.NoSuchProcess):
            self._ipp.engines[_set(index)].signal(number)

    def death(self, index: int) -> str | None:
        """How an engine's process ended, in words; None while it lives."""
        if is_alive(self._engines[index].pid):
            return None
        code, deadline = self._exit_code(index), time.monotonic() + COLLECT_WITHIN_S
        while code is None and time.monotonic() < deadline:
            time.sleep(0.01)
            code = self._exit_code(index)
        return ending(code)

    def _exit_code(self, index: int) -> int | None:
        """What ipyparallel's waiting thread learns a moment after a process has ended."""
        processes = self._ipp.engines.get(_set(index))
        code: int | None = None if processes is None else processes.stop_data.get("exit_code")
        return code

    @property
    def is_controlled(self) -> bool:
        """Whether the controller lives; without it no message reaches an engine."""
        controller = self._ipp.controller
        return controller is not None and is_alive(controller.pid)

    def ensure(self, indices: Collection[int]) -> list[int]:
        """Starts those of these engines that are not there; returns which.

        Raises:
            ClusterError: they did not come up.
        """
        with self._starting:
            absent = [i for i in indices if i not in self._engines or self.death(i)]
            if absent:
                self._background.run(self._restart(absent))
            return absent

    def stop(self) -> None:
        """Ends all processes, now, and removes the scratch folder."""
        if self._client is not None:
            self._client.close()
        reap(self.id)
        if not self._background.is_current:  # else a garbage collection brought us here
            with suppress(RuntimeError):  # stopped before
                self._background.run(self._collect())
        self._background.close()
        shutil.rmtree(self.scratch, ignore_errors=True)

    async def _start(self, indices: Collection[int]) -> None:
        try:
            await self._ipp.start_controller()
            await self._launch(indices)
            self._client = await self._ipp.connect_client(ipython_dir=str(self.scratch / "ipython"))
        except (RuntimeError, OSError) as error:
            said = self._ipp.controller.get_output() if self._ipp.controller else ""
            raise ClusterError(f"the controller did not start: {error}\n{said[-2000:]}") from error
        await self._arrival(indices)

    async def _launch(self, indices: Collection[int]) -> None:
        security = Path(self._ipp.profile_dir) / "security"
        for index in indices:
            await self._ipp.start_engines(
                n=1,
                engine_set_id=_set(index),
                enter=list(self.ground.sites[index].enter),
                environment=engine_environment(
                    index,
                    self.ground.devices[index],
                    self.ground.sites[index],
                    self.scratch,
                    security / f"ipcontroller-{self.id}-engine.json",
                ),
            )

    async def _arrival(self, indices: Collection[int]) -> None:
        """Returns when each of these engines has registered and said which one it is."""
        deadline, missing = time.monotonic() + START_WITHIN_S, set(indices)
        while missing:
            for engine_id in set(self._client.ids) - self._seen:
                self._seen.add(engine_id)
                answer = self._client[engine_id].apply_async(introduce)
                try:
                    index, pid = await asyncio.wait_for(asyncio.wrap_future(answer), START_WITHIN_S)
                except ipyparallel.RemoteError as error:
                    raise ClusterError(f"an engine came up and cannot work: {error}") from error
                self._engines[index] = Engine(index, engine_id, pid, self.ground.devices[index])
                missing.discard(index)
            for index in missing:
                processes = self._ipp.engines[_set(index)]
                if processes.state == "after":
                    said = processes.get_output()
                    raise ClusterError(f"engine {index} did not start:\n{said[-2000:]}")
            if time.monotonic() > deadline:
                raise ClusterError(
                    f"{len(indices) - len(missing)} of {len(indices)} engines came within "
                    f"{START_WITHIN_S:g} s; this host may be overloaded"
                )
            await asyncio.sleep(0.02)

    async def _restart(self, indices: Collection[int]) -> None:
        for index in indices:
            if _set(index) in self._ipp.engines:
                await self._ipp.stop_engines(_set(index))
        await self._launch(indices)
        await self._arrival(indices)

    async def _collect(self) -> None:
        """Lets ipyparallel notice that its processes have ended."""
        with suppress(Exception):
            await self._ipp.stop_cluster()


def _set(index: int) -> str:
    """The name of the engine set that holds one engine."""
    return f"engine-{index}"
