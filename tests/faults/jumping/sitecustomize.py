"""A clock that jumps: what Python imports as it starts, where this folder is in its path.

The file that `WORKBENCH_TESTS_CLOCK` names says by how many seconds the clock is ahead, and since
when; before it is there, by none. The time of day, and the dates of files that were changed since
then, are as after such a jump of the host's clock; clocks that only count on do not jump, as there.
"""

import os
import time

FILE = "WORKBENCH_TESTS_CLOCK"


def install(path: str) -> None:
    """Has this process's clock jump when the file says so."""
    now, now_ns, look = time.time, time.time_ns, os.stat

    def jump() -> tuple[float, float]:
        try:
            with open(path) as file:
                ahead, since = file.read().split()
            return float(ahead), float(since)
        except (OSError, ValueError):
            return 0.0, 0.0

    def jumped(status: os.stat_result) -> os.stat_result:
        ahead, since = jump()
        if not ahead or status.st_mtime < since:
            return status
        more = {name: getattr(status, name) for name in dir(status) if name.startswith("st_")}
        more["st_mtime"] += ahead
        more["st_mtime_ns"] += int(ahead * 1e9)
        return os.stat_result(tuple(status), more)

    time.time = lambda: now() + jump()[0]
    time.time_ns = lambda: now_ns() + int(jump()[0] * 1e9)
    os.stat = lambda *given, **options: jumped(look(*given, **options))


if FILE in os.environ:
    install(os.environ[FILE])
