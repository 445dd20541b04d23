"""Messages under way that can be asked whether they have arrived."""

import threading
from collections.abc import Sequence
from datetime import timedelta
from queue import SimpleQueue

import torch.distributed as dist

NO_LIMIT = timedelta(seconds=-1)


class Transit:
    """Point-to-point works that are waited for together, as if they were one.

    Torch's own for gloo know that they are done only once somebody has waited for them, without
    a limit: one that runs out breaks the connections. So a thread waits.
    """

    def __init__(self, works: Sequence[dist.Work]) -> None:
        self._works = list(works)
        self._done = threading.Event()
        self._error: RuntimeError | None = None

    def is_completed(self) -> bool:
        """Whether it is over, for good or ill."""
        return self._done.is_set()

    def wait(self, timeout: timedelta = NO_LIMIT) -> bool:
        """Returns when all has been sent and received; it can be interrupted.

        Raises:
            RuntimeError: not within `timeout`, or a connection broke.
        """
        if not self._done.wait(None if timeout < timedelta(0) else timeout.total_seconds()):
            raise RuntimeError("still under way")
        if self._error is not None:
            raise self._error
        return True

    def see_through(self) -> None:
        """Waits for the works; on a thread that has nothing else to do."""
        try:
            for work in self._works:
                work.wait()
        except RuntimeError as error:
            self._error = error
        self._works.clear()

    def conclude(self) -> None:
        """Tells whoever asks or waits."""
        self._done.set()


class Waiters:
    """Threads that wait for messages: one for each transit that is under way at one time.

    Fewer would not do: behind a message that comes late others would wait in vain, and with them
    the ranks whose turn is next.
    """

    def __init__(self) -> None:
        self._idle: list[SimpleQueue[Transit | None]] = []
        self._closed = False

    def begin(self, works: Sequence[dist.Work]) -> Transit:
        """Takes over works that have just been started."""
        transit = Transit(works)
        try:  # and not a look first: several threads may begin
            queue = self._idle.pop()
        except IndexError:
            queue = SimpleQueue()
            threading.Thread(target=self._attend, args=(queue,), daemon=True).start()
        queue.put(transit)
        return transit

    def close(self) -> None:
        """Ends the threads: at once, or when what they wait for is over."""
        self._closed = True
        for queue in self._idle:
            queue.put(None)

    def _attend(self, queue: "SimpleQueue[Transit | None]") -> None:
        while (transit := queue.get()) is not None:
            transit.see_through()
            self._idle.append(queue)
            transit.conclude()
            if self._closed:
                return
            del transit  # an idle thread keeps nothing alive
