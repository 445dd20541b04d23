"""The runs of a dashboard, by name."""

from collections.abc import Callable, Iterator, Mapping
from threading import RLock

from workbench.widgets.dashboard.run import Run
from workbench.widgets.dashboard.watched import Watched


class Several(Mapping[str, Watched]):
    """Each run is watched from when it is added until another takes its name.

    Args:
        guard: is held while what has been read changes.
        notify: is called, on any thread, when there may be news.
    """

    def __init__(self, guard: RLock, notify: Callable[[], None]) -> None:
        self._guard, self._notify = guard, notify
        self._watched: dict[str, Watched] = {}
        self._unsubscribe: dict[str, Callable[[], None]] = {}

    def watch(self, runs: Mapping[str, Run]) -> None:
        """Watches these and no others; what has been read of those that stay is kept."""
        before, watched = self._watched, dict[str, Watched]()
        for name, run in runs.items():
            known = before.get(name)
            if known is not None and known.run is run:
                watched[name] = known
                continue
            self._leave(name)
            self._unsubscribe[name] = run.subscribe(lambda _rows: self._notify())
            watched[name] = Watched(run, self._guard)
        for name in before.keys() - runs.keys():
            self._leave(name)
        self._watched = watched  # at once: other threads go through it

    def close(self) -> None:
        """Lets go of the runs; what was read stays."""
        for name in list(self._unsubscribe):
            self._leave(name)

    def _leave(self, name: str) -> None:
        if name in self._unsubscribe:
            self._unsubscribe.pop(name)()

    def __getitem__(self, name: str) -> Watched:
        return self._watched[name]

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._watched))

    def __len__(self) -> int:
        return len(self._watched)
