"""What takes longer than a click: searching, verifying, or what a run does after its step."""

import threading
from collections.abc import Callable, Mapping
from typing import Any


class Errands:
    """Each on a thread of its own; the views are told how it stands.

    Args:
        tell: is called with the errand's name and state: "running", "done" or "failed", with
            `text`, and `advice` where something can be done. It may be called on any thread.
        advice: what to do about each that fails, by its name.
    """

    def __init__(
        self, tell: Callable[[str, Mapping[str, Any]], None], advice: Mapping[str, str]
    ) -> None:
        self._tell, self._advice, self._guard = tell, advice, threading.Lock()
        self._under_way: set[str] = set()
        self._threads: list[threading.Thread] = []
        self._closed = False

    def start(self, name: str, work: Callable[[], Mapping[str, Any]], text: str) -> None:
        """Starts an errand, unless one of this name is under way.

        Args:
            name: of it.
            work: gives what the views are told in the end, beside "done".
            text: what they are told meanwhile.
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
        """Runs a short errand here."""
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
    """What views are told of an errand that came to nothing."""
    return {"state": "failed", "text": text, "advice": advice}
