"""A wish that a running experiment is to carry out between two steps, as a notebook sees it."""

import time
from collections.abc import Callable

from workbench.cluster.errors import ClusterError
from workbench.train.wishes import CarriedOut, Wish, Wishes

TICK_S = 0.05


class Wished:
    """The wish for another learning rate, or for a checkpoint.

    Args:
        wishes: for the run.
        wish: which.
        is_over: whether the run has ended.

    Attributes:
        wish: which.
    """

    def __init__(self, wishes: Wishes, wish: Wish, is_over: Callable[[], bool]) -> None:
        self.wish, self._wishes, self._is_over = wish, wishes, is_over
        self._number = wishes.wish(wish)

    @property
    def carried_out(self) -> CarriedOut | None:
        """After how many steps it was, and how long it took; None: it was not yet."""
        return self._wishes.carried_out(self._number)

    @property
    def is_superseded(self) -> bool:
        """Whether a later wish was carried out, and this one never will be."""
        return self.carried_out is None and self._wishes.last_carried_out() > self._number

    def wait(self, timeout: float = 60.0) -> CarriedOut:
        """Returns once the run has carried it out.

        Raises:
            ClusterError: the run ended before, or a later wish came instead.
            TimeoutError: it did not in time; it may still.
        """
        deadline = time.monotonic() + timeout
        while (found := self.carried_out) is None:
            if self.is_superseded:
                raise ClusterError("another plan was wished for later, and carried out instead")
            if self._is_over() and self.carried_out is None:
                raise ClusterError(
                    f"the run ended before {self.wish!r} was carried out; it will be once the run "
                    "is resumed"
                )
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self.wish!r} is not carried out yet")
            time.sleep(TICK_S)
        return found

    def __repr__(self) -> str:
        done = self.carried_out
        return f"<Wished: {self.wish!r}, {'not yet' if done is None else f'step {done.step}'}>"
