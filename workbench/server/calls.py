"""Calls on engines: small control messages through the controller, each of them counted."""

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import ipyparallel
from ipyparallel.serialize import pack_apply_message, serialize_object

from workbench.store.cluster_spec import connection_file, identity
from workbench.store.errors import ClusterError, ControlMessageTooLarge

LARGEST_MESSAGE_BYTES = 64 << 10
LOOK_EVERY_S = 0.02

Count = Callable[[str, int, int | None], None]


class Calls:
    """A client of a cluster's controller; any number of them, one after another or at once.

    Args:
        folder: the cluster's.
        count: is told each message: "sent" or "received", its bytes, and the job that it is
            about, if any.
        within_s: how long to wait for the controller.

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
            time.sleep(LOOK_EVERY_S)

    @property
    def registered(self) -> frozenset[int]:
        """Engines that can be called, by ipyparallel's ids, which are never given twice."""
        return frozenset(self._client.ids)

    def call(
        self, engine_id: int, function: Callable[..., Any], *arguments: Any, job: int | None = None
    ) -> Any:
        """Calls an importable function on an engine.

        A call is lost where the engine dies, or the controller while another takes its place.

        Args:
            engine_id: ipyparallel's.
            function: what to call; it goes by its name.
            arguments: of it.
            job: what it is about, for the count.

        Returns:
            ipyparallel's AsyncResult.

        Raises:
            ControlMessageTooLarge: function and arguments take more than 64 KiB.
            ClusterError: there is no such engine any more.
        """
        buffers = pack_apply_message(function, arguments, {})
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
            result = view.apply_async(function, *arguments)
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
