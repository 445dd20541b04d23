"""A thread that advances all-reduces while their rank computes.

Algorithms of several rounds go on only when somebody polls them. Where a step's computing is to
hide them whole, that cannot be the thread that computes: it is in one long operation after
another. This one sleeps between its looks, and adds up, encodes and sends in calls that leave the
interpreter's lock to others. It starts no collective: their order is that in which the computing
thread starts them, the same on all ranks.

Source: the communication thread of Pipe-SGD (arXiv:1811.03619).
"""

import threading
import time
import weakref
from collections.abc import Iterable
from contextlib import suppress

from workbench.comm.pending import Pending

# A round begins so much later than it could, and an idle look takes a hundredth of it.
LOOK_EVERY_S = 0.0005


class ProgressThread:
    """Looks after all-reduces for one rank; its thread lives while there are any."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._under_way: list[weakref.ref[Pending]] = []
        self._thread: threading.Thread | None = None

    def attend(self, pendings: Iterable[Pending]) -> None:
        """Advances those that need it, until they are done, fail, or nobody holds them any more.

        What fails is told to whoever waits for it.
        """
        new = [weakref.ref(pending) for pending in pendings if not pending.by_itself]
        with self._lock:
            self._under_way += new
            if self._under_way and self._thread is None:
                self._thread = threading.Thread(target=self._look, name="attendant", daemon=True)
                self._thread.start()

    def _look(self) -> None:
        while True:
            with self._lock:
                looked_at = list(self._under_way)
            over = [ref for ref in looked_at if _is_over(ref)]
            with self._lock:
                self._under_way = [ref for ref in self._under_way if ref not in over]
                if not self._under_way:
                    self._thread = None
                    return
            time.sleep(LOOK_EVERY_S)


def _is_over(ref: weakref.ref[Pending]) -> bool:
    pending = ref()
    if pending is None:
        return True
    with suppress(Exception):  # `wait` raises it
        return pending.poll_beside()
    return True
