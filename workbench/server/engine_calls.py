"""How the job server reaches engines: small control messages, each counted, none waited for."""

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import ipyparallel
from ipyparallel.serialize import pack_apply_message, serialize_object

from workbench.store import tasks
from workbench.store.cluster_spec import connection_file, identity
from workbench.store.errors import ClusterError, ControlMessageTooLarge
from workbench.store.messages import Assignment
from workbench.store.record import LARGEST_MESSAGE_BYTES

POLL_EVERY_S = 0.02

Count = Callable[[str, int, int | None], None]


class Calls:
    """A client of a cluster's controller; any number of them, one after another or at once.

    Args:
        count: takes each message: "sent" or "received", its bytes, and the job that it is about, if
            any.

    Raises:
        ClusterError: there is no controller.
    """

    def __init__(self, folder: Path, count: Count, *, within_s: float = 60.0) -> None:
        self._count = count
        self._sending = threading.Lock()
        deadline = time.monotonic() + within_s
        while True:
            try:
                self._client = ipyparallel.Client(
                    str(connection_file(folder, "client")),
                    cluster_id=identity(folder),
                    profile_dir=str(folder / "profile"),
                    ipython_dir=str(folder / "ipython"),
                    timeout=within_s,
                )
                return
            except (OSError, ValueError, ipyparallel.TimeoutError) as error:  # not, or half there
                if time.monotonic() > deadline:
                    raise ClusterError(f"no controller answers in {folder}: {error}") from error
            time.sleep(POLL_EVERY_S)

    @property
    def registered(self) -> frozenset[int]:
        """Engines that can be called, by ipyparallel's ids, which are never given twice."""
        return frozenset(self._client.ids)

    def call(self, engine_id: int, task: str, *arguments: Any, job: int | None = None) -> Any:
        """Calls a task on an engine.

        A call is lost where the engine dies, or the controller while another takes its place.

        Args:
            task: its name, as `tasks.call` takes it.
            job: the job that it is about, for the count.

        Returns:
            ipyparallel's AsyncResult.

        Raises:
            ControlMessageTooLarge: the arguments take more than 64 KiB.
            ClusterError: there is no such engine any more.
        """
        buffers = pack_apply_message(tasks.call, (task, *arguments), {})
        size = sum(memoryview(buffer).nbytes for buffer in buffers)
        if size > LARGEST_MESSAGE_BYTES:
            raise ControlMessageTooLarge(
                f"a message of {size:,} bytes to engine {engine_id}: control messages have at "
                f"most {LARGEST_MESSAGE_BYTES:,}. Tensors, data and weights do not travel this "
                "way: let the ranks read them from a file, or make them from a seed"
            )
        with self._sending:  # the client numbers its messages without a lock
            try:
                view = self._client[engine_id]
            except (IndexError, ipyparallel.NoEnginesRegistered) as error:
                raise ClusterError(f"no engine has the id {engine_id}") from error
            self._count("sent", size, job)
            result = view.apply_async(tasks.call, task, *arguments)
        result.add_done_callback(lambda done: self._received(done, job))
        return result

    def close(self) -> None:
        """Ends the connection; what runs on engines goes on."""
        self._client.close(linger=0)

    def _received(self, result: Any, job: int | None) -> None:
        """Counts an answer, and forgets the call, which the client would remember for ever."""
        with suppress(Exception):  # the call raised; or its engine died and sent nothing
            answer = serialize_object(result.result())
            self._count("received", sum(memoryview(buffer).nbytes for buffer in answer), job)
        for message in result.msg_ids:
            with suppress(ValueError):
                self._client.history.remove(message)


CONNECT_AGAIN_S = 0.1
CONNECT_WITHIN_S = 10.0


@dataclass(frozen=True)
class Arrival:
    """An engine that has registered: its number with the controller, and its process."""

    engine_id: int
    pid: int


@dataclass(frozen=True)
class Refusal:
    """A call that ended with an error."""

    tag: object
    error: Exception


class EngineCalls(Protocol):
    """Whoever can call tasks on engines; nothing here waits."""

    @property
    def connection(self) -> int:
        """Changes with the controller; engines have other numbers then, and arrive again."""

    def arrivals(self) -> list[Arrival]:
        """Engines that have registered since the last call."""

    def call(self, engine_id: int, given: Assignment, *, job: int, tag: object) -> None:
        """Has an engine run a rank.

        Raises:
            ControlMessageTooLarge: what is assigned takes more than 64 KiB.
            ClusterError: there is no way to that engine now.
        """

    def refusals(self) -> list[Refusal]:
        """Calls that ended with an error since the last call of this."""

    def close(self) -> None:
        """Lets go of the engines; what runs on them goes on."""


class ControllerCalls:
    """Calls through the controller of a cluster.

    Connects from a thread of its own, again and again: a controller that is not there, or not
    there any more, must not keep the server from watching what runs.

    Args:
        count: takes each message, as `Calls` has it.
    """

    def __init__(self, folder: Path, count: Count) -> None:
        self._folder, self._count = folder, count
        self._calls: Calls | None = None
        self.connection = 0
        self._seen: set[int] = set()
        self._introductions: dict[int, Any] = {}
        self._under_way: list[tuple[object, Any]] = []
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._connect, name="connect", daemon=True)
        self._thread.start()

    def arrivals(self) -> list[Arrival]:
        """Engines that have registered since the last call."""
        calls = self._calls
        if calls is None:
            return []
        for engine_id in calls.registered - self._seen:
            self._seen.add(engine_id)
            with suppress(ClusterError):  # it is gone again
                self._introductions[engine_id] = calls.call(engine_id, "introduce")
        arrived = []
        for engine_id, answer in list(self._introductions.items()):
            if answer.ready():
                del self._introductions[engine_id]
                with suppress(Exception):  # it ended meanwhile
                    arrived.append(Arrival(engine_id, answer.get(0)))
        return arrived

    def call(self, engine_id: int, given: Assignment, *, job: int, tag: object) -> None:
        """Has an engine run a rank.

        Raises:
            ClusterError: the engine is not registered.
        """
        calls = self._calls
        if calls is None or engine_id not in calls.registered:
            raise ClusterError(f"engine {engine_id} is not registered")
        answer = calls.call(engine_id, "run", given, job=job)
        self._under_way.append((tag, answer))

    def refusals(self) -> list[Refusal]:
        """Calls that ended with an error since the last call of this."""
        ended = [(tag, answer) for tag, answer in self._under_way if answer.ready()]
        self._under_way = [each for each in self._under_way if each not in ended]
        found = []
        for tag, answer in ended:
            try:
                answer.get(0)
            except Exception as error:
                found.append(Refusal(tag, error))
        return found

    def close(self) -> None:
        """Lets go of the engines; what runs on them goes on."""
        self._closing.set()
        self._thread.join()
        if self._calls is not None:
            self._calls.close()

    def _connect(self) -> None:
        """Connects as soon as there is a controller, and again when another took its place."""
        path, connected = connection_file(self._folder, "client"), b""
        while not self._closing.wait(CONNECT_AGAIN_S):
            with suppress(OSError, ClusterError):
                said = path.read_bytes()
                if said != connected:
                    before, self._calls = self._calls, None
                    if before is not None:
                        before.close()
                    calls = Calls(self._folder, self._count, within_s=CONNECT_WITHIN_S)
                    self._seen, self._introductions, self._under_way = set(), {}, []
                    self._calls, connected = calls, said
                    self.connection += 1
