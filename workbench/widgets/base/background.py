"""What takes longer than a click, beside the user interface.

`BackgroundTasks` runs searching, verifying, or what a run does after its step, each on a thread of
its own; of requests to a `LatestWorker` only the latest counts.
"""

import threading
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar


class BackgroundTasks:
    """Each on a thread of its own; the views are told how it stands.

    Args:
        tell: Called with the task's name and state: "running", "done" or "failed", with `text`, and
            `advice` where something can be done. It may be called on any thread.
        advice: what to do about each task that fails, by its name.
    """

    def __init__(
        self, tell: Callable[[str, Mapping[str, Any]], None], advice: Mapping[str, str]
    ) -> None:
        self._tell, self._advice, self._guard = tell, advice, threading.Lock()
        self._under_way: set[str] = set()
        self._threads: list[threading.Thread] = []
        self._closed = False

    def start(self, name: str, work: Callable[[], Mapping[str, Any]], text: str) -> None:
        """Starts a task, unless one of this name is under way.

        Args:
            name: the task's name; only one of a name is under way.
            work: the task; it gives what the views are told in the end, beside "done".
            text: what the views are told meanwhile.
        """
        with self._guard:
            if self._closed or name in self._under_way:
                return
            thread = threading.Thread(
                target=self._run, args=(name, work), name=f"widget: {name}", daemon=True
            )
            self._under_way.add(name)
            self._threads = [*(one for one in self._threads if one.is_alive()), thread]
        self._tell(name, {"state": "running", "text": text})
        thread.start()

    def at_once(self, name: str, work: Callable[[], Mapping[str, Any]]) -> None:
        """Runs a short task here."""
        self._tell(name, self._outcome(name, work))

    def wait(self, timeout: float) -> bool:
        """Waits until none is under way; whether that was in time."""
        with self._guard:
            threads = list(self._threads)
        for thread in threads:
            if thread.ident is not None:
                thread.join(timeout)
        return not any(thread.is_alive() for thread in threads)

    def close(self) -> None:
        """What is under way goes on, and nobody hears of it."""
        with self._guard:
            self._closed = True

    def _run(self, name: str, work: Callable[[], Mapping[str, Any]]) -> None:
        state = self._outcome(name, work)
        with self._guard:  # first: who hears that it is done may start it again
            self._under_way.remove(name)
        if not self._closed:
            self._tell(name, state)

    def _outcome(self, name: str, work: Callable[[], Mapping[str, Any]]) -> Mapping[str, Any]:
        try:
            return {"state": "done", **work()}
        except Exception as error:  # it belongs into the widget: nobody reads a thread's log
            text = str(error) or type(error).__name__
            return failed(text, self._advice.get(name, ""))


def failed(text: str, advice: str = "") -> dict[str, Any]:
    """What views are told of a task that came to nothing."""
    return {"state": "failed", "text": text, "advice": advice}


T = TypeVar("T")


class LatestWorker(Generic[T]):
    """One thread that works on the newest request; those in between are skipped.

    Args:
        work: Called on the thread with each request; it hands on what it found by itself, and must
            not raise.
        name: the thread's name.
        rest: Called on the thread once nothing was asked for `rest_s` seconds after work.
        rest_s: seconds without a request until `rest` is called.
    """

    def __init__(
        self, work: Callable[[T], None], name: str, rest: Callable[[], None], rest_s: float = 1.0
    ) -> None:
        self._work, self._name, self._rest, self._rest_s = work, name, rest, rest_s
        self._changed = threading.Condition()
        self._waiting: list[T] = []
        self._busy = self._closed = False
        self._thread: threading.Thread | None = None

    def ask(self, request: T) -> None:
        """Replaces the request that waits, if there is one; returns at once."""
        with self._changed:
            if self._closed:
                return
            self._waiting[:] = [request]
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def superseded(self) -> bool:
        """Whether a newer request waits, so that what is under way is of no use any more."""
        return bool(self._waiting) or self._closed

    def settle(self, timeout: float) -> bool:
        """Waits until there is nothing to do; whether that was in time."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._waiting and not self._busy, timeout)

    def close(self) -> None:
        """Ends the thread after what it is at."""
        with self._changed:
            self._closed = True
            self._waiting.clear()
            self._changed.notify_all()

    def _run(self) -> None:
        worked = False
        while True:
            with self._changed:
                self._busy = False
                self._changed.notify_all()
                patience = self._rest_s if worked else None
                called = self._changed.wait_for(self.superseded, patience)
                if self._closed:
                    return
                if called:
                    request, self._busy = self._waiting.pop(), True
            if called:
                self._work(request)
            else:
                self._rest()
            worked = called
