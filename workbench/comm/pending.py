"""Sums under way while their caller computes on, and the thread that advances them meanwhile."""

import threading
import time
import weakref
from collections.abc import Iterable
from contextlib import suppress

from torch import Tensor

from workbench.comm.groups.group import GroupCall
from workbench.comm.messages.flat import AsyncOperation

# A round begins so much later than it could, and an idle look takes a hundredth of it.
LOOK_EVERY_S = 0.0005


class Pending:
    """A collective under way; its buffer holds the result once `wait` has returned.

    Several threads may poll it. What goes wrong while one does is raised again by `wait`.

    Args:
        call: the call that is under way.
        progress: what advances it; None if there is nothing to do.
        copied_back: (a buffer, the copy of it that is summed, elsewhere or in a wider type): the
            sum is copied into the buffer at last; None if it is summed where it is.
        by_itself: whether it goes on when nobody polls. Then to poll is to wait, where it is a
            GPU's stream that waits and not the host: leave it until the sum is needed.
    """

    def __init__(
        self,
        call: GroupCall,
        progress: AsyncOperation | None,
        copied_back: tuple[Tensor, Tensor] | None = None,
        *,
        by_itself: bool = False,
    ) -> None:
        self.by_itself = by_itself
        self._call, self._progress, self._copied_back = call, progress, copied_back
        self._lock = threading.Lock()
        self._error: Exception | None = None

    def poll(self) -> bool:
        """Does what has become possible without waiting; returns whether the result is there.

        While another thread advances it, the result is not there.

        Raises:
            CommError: another rank did not come, or a connection broke.
        """
        if self._progress is None:
            return True
        with self._call.told("helping"):
            return self._advanced()

    def poll_beside(self) -> bool:
        """Does what `poll` does, on a thread that takes no time from the rank's computing."""
        if self._progress is None:
            return True
        over = self._advanced()
        if over:
            with self._call.told("helping"):
                pass  # whoever listens hears when it ended
        return over

    def wait(self) -> None:
        """Returns when the result is there; only this time counts as blocked.

        Raises:
            CommError: other ranks did not come, or came for something else.
        """
        if self._progress is None:
            return
        with self._call.timed(), self._lock:
            self._raise_again()
            if self._progress is not None:
                self._progress.wait()
                self._finish()

    def _advanced(self) -> bool:
        if not self._lock.acquire(blocking=False):
            return False
        try:
            self._raise_again()
            if self._progress is not None and self._progress.advance():
                self._finish()
            return self._progress is None
        except Exception as error:
            self._error = error
            raise
        finally:
            self._lock.release()

    def _raise_again(self) -> None:
        """Raises what failed earlier: a part of it that failed must not pass for done."""
        if self._error is not None:
            raise self._error

    def _finish(self) -> None:
        """Keeps nothing: whoever polls may hold on to this for longer than memory should live."""
        if self._copied_back is not None:
            self._call.mark("copy")
            flat, travelled = self._copied_back
            flat.copy_(travelled)
        self._progress = self._copied_back = None
        self._call.conclude()


class ProgressThread:
    """Advances all-reduces while their rank computes; its thread lives while there are any.

    Algorithms of several rounds go on only when somebody polls them. Where a step's computing is
    to hide them whole, that cannot be the thread that computes: it is in one long operation after
    another. This one sleeps between its looks, and adds up, encodes and sends in calls that leave
    the interpreter's lock to others. It starts no collective: their order is that in which the
    computing thread starts them, the same on all ranks.

    Source: the communication thread of Pipe-SGD (arXiv:1811.03619).
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._under_way: list[weakref.ref[Pending]] = []
        self._thread: threading.Thread | None = None

    def attend(self, pendings: Iterable[Pending]) -> None:
        """Advances those that need it, until they are done, fail, or nobody holds them any more.

        What fails is raised to whoever waits for it.
        """
        new = [weakref.ref(pending) for pending in pendings if not pending.by_itself]
        with self._lock:
            self._under_way += new
            if self._under_way and self._thread is None:
                self._thread = threading.Thread(target=self._look, name="progress", daemon=True)
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
