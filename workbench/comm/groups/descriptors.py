"""How many files a process may have open: every connection of a group is one."""

import resource
from contextlib import suppress

# Where a system states no limit it has one all the same.
_MANY = 2**16


def raise_limit() -> None:
    """Lets this process have as many open as it may at most; where that is refused, as before.

    A rank of n is connected to up to n - 1 others in each of its groups, and shells mostly begin
    with a limit of 1024.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MANY if hard == resource.RLIM_INFINITY else hard
    if soft not in (resource.RLIM_INFINITY, hard) and soft < wanted:
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
