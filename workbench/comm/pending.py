"""The all-reduce that runs while its caller computes on."""

import threading
from functools import partial

from torch import Tensor

from workbench.comm.algorithms.course import RoundExecutor, begin
from workbench.comm.algorithms.hierarchical import across
from workbench.comm.algorithms.over_hosts import sum_over_hosts
from workbench.comm.algorithms.progress import Progress
from workbench.comm.codecs.coded import checked, coding_of
from workbench.comm.codecs.coding import Coding
from workbench.comm.groups.group import Call, Group, Link
from workbench.comm.pieces import accumulator, even
from workbench.comm.shared_memory.buffer import SharedBuffer
from workbench.plan.all_reduce import Algorithm
from workbench.plan.codec import Codec


class Pending:
    """An all-reduce under way; its buffer holds the sum once `wait` has returned.

    Several threads may poll it. What goes wrong while one does is raised again by `wait`.

    Args:
        call: it.
        progress: of the sum; None if there is nothing to do.
        returned: a buffer, and the copy, elsewhere or of a wider type, whose sum it is to hold;
            None if it is summed where it is.
        by_itself: whether it goes on when nobody polls. Then to poll is to wait, where it is a
            GPU's stream that waits and not the host: leave it until the sum is needed.
    """

    def __init__(
        self,
        call: Call,
        progress: Progress | None,
        returned: tuple[Tensor, Tensor] | None = None,
        *,
        by_itself: bool = False,
    ) -> None:
        self.by_itself = by_itself
        self._call, self._progress, self._returned = call, progress, returned
        self._lock = threading.Lock()
        self._error: Exception | None = None

    def poll(self) -> bool:
        """Does what has become possible, and waits for nothing; whether the sum is there.

        While another thread is at it, it is not.
        """
        if self._progress is None:
            return True
        with self._call.told("helping"):
            return self._advanced()

    def poll_beside(self) -> bool:
        """As `poll`, on a thread that takes no time from the rank's computing."""
        if self._progress is None:
            return True
        over = self._advanced()
        if over:
            with self._call.told("helping"):
                pass  # whoever listens hears when it ended
        return over

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

    def wait(self) -> None:
        """Returns when the sum is there; only this time counts as blocked.

        Raises:
            CommError: as for a collective that blocks.
        """
        if self._progress is None:
            return
        with self._call.timed(), self._lock:
            self._raise_again()
            if self._progress is not None:
                self._progress.wait()
                self._finish()

    def _raise_again(self) -> None:
        """A part of it that failed must not pass for done."""
        if self._error is not None:
            raise self._error

    def _finish(self) -> None:
        """Keeps nothing: whoever polls may hold on to this for longer than memory should live."""
        if self._returned is not None:
            self._call.mark("copy")
            flat, travelled = self._returned
            flat.copy_(travelled)
        self._progress = self._returned = None
        self._call.conclude()


class Turn:
    """One sum of a shared buffer."""

    def __init__(self, buffer: SharedBuffer, call: Call) -> None:
        self._buffer, self._call = buffer, call

    def advance(self) -> bool:
        return self._buffer.advance()

    def wait(self) -> None:
        self._buffer.wait(self._call)


def start_all_reduce(
    flat: Tensor,
    group: Group,
    *,
    algorithm: Algorithm = "auto",
    codec: Codec | str | None = None,
    residual: Tensor | None = None,
    layer: str = "",
) -> Pending:
    """Starts to sum `flat`, contiguous and one-dimensional, in place over the group.

    The caller computes on, and leaves `flat` alone until it has waited. Any number may be under
    way; all ranks start them in one order. The sum is bitwise equal on all ranks.

    "backend", which is "auto" where ranks share no memory, runs on threads of its own. All others
    are advanced by the ranks themselves, when they `poll` or wait for anything: cores that compute
    are not taken, and what is on the wire goes on, but no next round begins meanwhile, unless an
    `ProgressThread` looks after them.

    "direct" and "hierarchical" sum a buffer that `Group.buffer` made where it lies. Of any other
    tensor "direct" is sent through the communicator, "auto" within one host leaves it to the
    backend, and "hierarchical" sums it before this returns, unless the rank is alone on its host:
    memory that is staged is not looked after in between.

    A codec and its residual are as for `all_reduce`. The residual is left alone like `flat`; what
    cannot be encoded is said here, or by whoever polls or waits.

    Raises:
        ValueError: `flat` is not a contiguous one-dimensional tensor, or there is no such
            algorithm, or it cannot take a codec, or the codec cannot take `flat` or `residual`.
        CodecError: a value is no number, or too large for the codec.
        RuntimeError: `flat` is a shared buffer whose last sum has not been waited for.
    """
    if flat.ndim != 1 or not flat.is_contiguous():
        shape, stride = tuple(flat.shape), flat.stride()
        raise ValueError(f"needs one contiguous dimension, got shape {shape}, stride {stride}")
    flat = flat.detach()
    codec = checked(codec, flat, group, residual)
    buffer = group.shared(flat)
    name = group.chosen(algorithm, flat.nbytes, beside=buffer is None, codec=codec)
    call, link = group.call("all_reduce", layer, "step"), group.link
    if link is None:
        return Pending(call, None)
    coding = coding_of(codec, call, residual)
    staged = name == "direct" and link.staging is not None and coding is None
    with call.told("helping"):
        if buffer is not None and (staged or name == "hierarchical"):
            pending = Pending(call, _start(buffer, len(flat), link, call, coding))
        else:
            wide = flat.dtype if name != "backend" and coding is None else accumulator(flat.dtype)
            travelling = flat.to(link.device, wide)
            start = _start_over_hosts if name == "hierarchical" else partial(begin, name)
            returned = None if travelling is flat else (flat, travelling)
            course = start(travelling, link, call, coding)
            pending = Pending(call, course, returned, by_itself=name == "backend")
    if not pending.by_itself:
        link.watch.also(pending.poll)
    return pending


def _start(
    buffer: SharedBuffer, length: int, link: Link, call: Call, coding: Coding | None
) -> Progress:
    staging, rank = buffer.staging, call.group.rank
    of = None if coding is None else coding.cut(even(length, staging.size))[staging.rank]
    call.count_two_rounds(length, buffer.nbytes // length, link.beside(rank))

    def cross(segment: Tensor) -> RoundExecutor:
        return RoundExecutor(across(segment, length, link.hosts, rank, of), call)

    buffer.start(None if len(link.hosts) == 1 else cross, call.mark)
    return Turn(buffer, call)


def _start_over_hosts(flat: Tensor, link: Link, call: Call, coding: Coding | None) -> Progress:
    if link.local is None:
        return RoundExecutor(across(flat, len(flat), link.hosts, call.group.rank, coding), call)
    with call.timed():
        sum_over_hosts(flat, link, call, flat.nbytes, coding)
    return RoundExecutor(iter(()), call)  # nothing is left to do
