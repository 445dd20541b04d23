"""Names of what emulated hosts leave in the system: they say whose they are.

A tag is wb<process id>-<number>; all that belongs to one owner's network is named <tag>-<what>.
"""

import itertools
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from filelock import FileLock, Timeout

from workbench.hosts.processes import is_alive
from workbench.store.errors import HostsError

LOCK = "/run/workbench-hosts.lock"
LOCK_WITHIN_S = 60.0


@contextmanager
def alone() -> Iterator[None]:
    """One process of this machine at a time: to find what is free, and to take it.

    Raises:
        HostsError: another process does not come to an end with it.
    """
    try:
        held = FileLock(LOCK).acquire(timeout=LOCK_WITHIN_S)
    except Timeout as error:
        raise HostsError(f"another process has held {LOCK} for {LOCK_WITHIN_S:g} s") from error
    with held:
        yield


def new(names: Iterable[str]) -> str:
    """A tag of this process that none of these names has.

    It is an interface's name too, which has at most 15 bytes.
    """
    taken = list(names)
    for number in itertools.count():
        tag = f"wb{os.getpid()}-{number}"
        if not any(belongs(name, tag) for name in taken):
            return tag
    raise AssertionError("unreachable")


def belongs(name: str, tag: str) -> bool:
    """Whether something has this tag."""
    return name.startswith(f"{tag}-")


def abandoned(names: Iterable[str]) -> set[str]:
    """The tags in these names whose process has ended."""
    found = (re.match(r"(wb(\d+)-\d+)-", name) for name in names)
    return {match[1] for match in found if match and not is_alive(int(match[2]))}
