"""A cluster of nothing but a store, and jobs to fill it with."""

import time
from types import SimpleNamespace
from typing import Any

from tests.scheduler.values import request
from workbench.store.errors import ClusterError
from workbench.store.store import Store

GIB = 1 << 30


class FakeCluster:
    """Answers as one that runs; its store is a real one, which the test fills."""

    def __init__(self, folder: Any, engines: int = 4, name: str = "bench") -> None:
        self.name, self.is_stopped = name, False
        self.devices = tuple(f"core {index}" for index in range(engines))
        self.link = SimpleNamespace(store=Store(folder / "store.db", create=True), is_kept=True)
        self.jobs = FakeJobs(self.link.store)
        for index in range(engines + 1):
            fields = {"state": "idle", "memory_bytes": 16 * GIB, "rss_bytes": GIB, "cpu_share": 0.5}
            self.link.store.set_engine(index, is_assistant=index == engines, **fields)

    def submit(self, **fields: Any) -> int:
        """Queues a job, and then gives it these fields."""
        asked = {*fields} & {"name", "steps", "tag", "kind"}
        own = {name: fields.pop(name) for name in asked}
        number = self.link.store.submit(request(fields.pop("engines", 1), **{"steps": 100, **own}))
        if fields:
            self.link.store.update(number, **fields)
        return number

    def run(self, number: int, places: tuple[int, ...], step: int = 0) -> None:
        """Lets a job begin."""
        assert self.link.store.claim(number, 0, places)
        self.link.store.update(number, state="running", step=step, began_at=time.time() - 60)


class FakeJobs:
    """Does at once what the job server would do."""

    def __init__(self, store: Store) -> None:
        self._store, self.refuses = store, ""

    def pause(self, number: int) -> None:
        self._become(number, "paused")

    def stop(self, number: int) -> None:
        self._become(number, "stopped")

    def cancel(self, number: int) -> None:
        self._become(number, "cancelled")

    def resume(self, number: int) -> None:
        self._become(number, "queued")

    def set_priority(self, number: int, priority: int) -> None:
        self._check()
        self._store.update(number, priority=priority)

    def _become(self, number: int, state: Any) -> None:
        self._check()
        self._store.release(number, state)

    def _check(self) -> None:
        if self.refuses:
            raise ClusterError(self.refuses)
