"""All jobs of a store, read so that ten thousand that have ended cost nothing any more."""

from workbench.store.record import ENDED, JobRecord, State
from workbench.store.store import Store


class Ledger:
    """What is known of every job that trains, by number.

    Jobs that have ended stay as they are until they are resumed, and are read once.

    Args:
        store: of the cluster.
    """

    def __init__(self, store: Store) -> None:
        self.store = store
        self._known: dict[int, JobRecord] = {}
        self._last = 0

    def read(self) -> tuple[JobRecord, ...]:
        """All of them, as they are now, in the order of submission.

        Raises:
            StoreError: the store cannot be read.
        """
        live = {job.id for job in self._known.values() if job.state not in ENDED}
        found = {job.id: job for job in self.store.jobs(after=self._last)}
        found |= {job.id: job for job in self.store.jobs(states=_LIVE)}
        for number in live - found.keys():  # these have ended since
            found[number] = self.store.job(number)
        self._last = max(self._last, *found, 0)
        self._known |= {number: job for number, job in found.items() if job.kind == "train"}
        return tuple(self._known[number] for number in sorted(self._known))


_LIVE: tuple[State, ...] = ("queued", "starting", "running", "stopping", "paused")
