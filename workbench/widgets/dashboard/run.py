"""What a dashboard needs of a run, and of the cluster that it runs on."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from workbench.predict.measured import Timeline
from workbench.widgets.dashboard.series import Row

ENDED = ("finished", "stopped", "failed")


class Run(Protocol):
    """A run; `workbench.client.Run` is one, and more."""

    @property
    def id(self) -> int | None:
        """The number of its job."""

    @property
    def state(self) -> str:
        """Is "queued", "starting", "running", "paused", "finished", "stopped" or "failed"."""

    @property
    def reason(self) -> str:
        """Says why it waits; "" while it does not."""

    @property
    def is_stopping(self) -> bool:
        """Tells whether it was asked to stop."""

    @property
    def experiment(self) -> Any:
        """What runs."""

    @property
    def rows(self) -> Sequence[Row]:
        """Grows: one row for each step and rank, in the order of arrival."""

    @property
    def evaluation(self) -> Mapping[str, float]:
        """Holds "accuracy" once the run has ended."""

    @property
    def error(self) -> BaseException | None:
        """Says why it failed."""

    @property
    def notes(self) -> Sequence[str]:
        """Says what else should be known."""

    @property
    def cluster(self) -> Any:
        """Whose engines it runs on, or None."""

    @property
    def engines(self) -> tuple[int, ...]:
        """The engine of each rank."""

    def events(self, after: int = 0) -> Sequence[Any]:
        """What the job server noted of it."""

    def timeline(self, step: int | None = None) -> Timeline:
        """What every rank did in a step that was traced."""

    def stop(self) -> None:
        """Asks the run to end after its current step."""

    def pause(self) -> None:
        """Has it give its engines back until it is resumed."""

    def resume(self) -> Any:
        """Goes on."""

    def set_lr(self, value: float) -> Any:
        """Goes on at another learning rate; what it gives can be waited for."""

    def checkpoint_now(self) -> Any:
        """Leaves a checkpoint; what it gives can be waited for."""

    def subscribe(self, callback: Callable[[Any], None]) -> Callable[[], None]:
        """Calls a function on changes, from some thread; gives what ends that."""


def runs_of(given: object) -> dict[str, Run]:
    """Runs by the names that they are shown under.

    Args:
        given: a run, several, or several by name.

    Raises:
        TypeError: none of these.
        ValueError: there is no run.
    """
    if isinstance(given, Mapping):
        found = {str(name): run for name, run in given.items()}
    else:
        several = list(given) if isinstance(given, Sequence) else [given]
        found = {}
        for index, run in enumerate(several):
            name = f"job {number}" if (number := getattr(run, "id", None)) else f"run {index + 1}"
            found[name if name not in found else f"{name} ({index + 1})"] = run
    if not found:
        raise ValueError("a dashboard shows a run, or several; there is none")
    for run in found.values():
        if not hasattr(run, "subscribe") or not hasattr(run, "rows"):
            raise TypeError(
                f"a dashboard shows runs, as cluster.train(experiment) or cluster.jobs[id] give "
                f"them; got {type(run).__name__}"
            )
    return found
