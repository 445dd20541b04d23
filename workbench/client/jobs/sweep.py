"""One experiment with several values of its fields, and what came of each."""

import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Self

from workbench.client.jobs.results import results
from workbench.client.run.run import Run
from workbench.client.run.waiting import TICK_S
from workbench.store.store import Store

if TYPE_CHECKING:
    import pandas


class Sweep:
    """Runs that were submitted together.

    Args:
        tag: that their jobs carry.
        runs: in the order of submission.
        store: that holds their jobs.
    """

    def __init__(self, tag: str, runs: Sequence[Run], store: Store) -> None:
        self.tag, self.runs, self._store = tag, tuple(runs), store

    def wait(self, timeout: float | None = None) -> Self:
        """Returns when all have ended, in whatever way; an interrupt stops all of them.

        Raises:
            TimeoutError: one did not end in time; they go on.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        try:
            for run in self.runs:
                while not run.join(TICK_S):
                    if deadline is not None and time.monotonic() > deadline:
                        raise TimeoutError(f"{self!r} after {timeout:g} s")
        except KeyboardInterrupt:
            self.stop()
            raise
        return self

    def stop(self) -> None:
        """Has all of them end after their current step."""
        for run in self.runs:
            run.stop()

    def table(self) -> "pandas.DataFrame":
        """One line for each run: its own values, how far it is, and what it reached.

        As `jobs.results.results`; `cluster.jobs.results(tag)` has it where this object is gone.
        """
        return results(self._store, self.tag)

    def __len__(self) -> int:
        return len(self.runs)

    def __iter__(self) -> Iterator[Run]:
        return iter(self.runs)

    def __repr__(self) -> str:
        done = sum(run.is_done for run in self.runs)
        return f"<Sweep {self.tag}: {done} of {len(self)} runs have ended>"

    def _repr_html_(self) -> str:
        return f"<div><p>{len(self)} runs</p>{self.table().to_html(index=False)}</div>"
