"""Groups whose messages come late, to measure what synchronisations cost where latency counts."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch.distributed as dist

from workbench.comm.groups.group import Group
from workbench.comm.transit import Transit, Waiters


def apart(group: Group) -> Group:
    """The same ranks, as if none of them shared memory."""
    assert group.link is not None
    link = replace(group.link, hosts=tuple((rank,) for rank in range(group.size)), local=None)
    return Group("apart", group.ranks, group.rank, group.recorder, link)


@contextmanager
def late(group: Group, late_s: float) -> Iterator[Group]:
    """The same ranks, whose messages come so much later."""
    assert group.link is not None
    waiters = _LateWaiters(late_s)
    link = replace(group.link, waiters=waiters)
    try:
        yield Group("late", group.ranks, group.rank, group.recorder, link)
    finally:
        waiters.close()


class _LateWaiters(Waiters):
    """What has come counts as there a while later; other messages are as late, side by side."""

    def __init__(self, late_s: float) -> None:
        super().__init__()
        self._late_s = late_s

    def begin(self, works: Sequence[dist.Work]) -> Transit:
        return super().begin([*works, _Pause(self._late_s)])


class _Pause(dist.Work):
    def __init__(self, seconds: float) -> None:
        super().__init__()
        self._seconds = seconds

    def wait(self, *_timeout: object) -> bool:
        time.sleep(self._seconds)
        return True
