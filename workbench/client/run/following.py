"""What a run is told by the job that it watches, and what it may ask of it."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol

from workbench.plan.experiment import Experiment
from workbench.plan.metrics import Row
from workbench.store.record import Event

if TYPE_CHECKING:
    from workbench.client.cluster import Cluster

Waits = Literal["queued", "starting", "paused"]
"""States in which no step is made."""


class Listener(Protocol):
    """Whoever watches a job; all of it is called on the thread that does."""

    def take(self, rows: list[Row]) -> None:
        """Takes new rows, in each rank's order."""

    def turn(self, state: Waits, reason: str) -> None:
        """Takes notice that no step is made now, and why."""

    def note(self, text: str) -> None:
        """Takes what people should know."""

    def under(self, experiment: Experiment) -> None:
        """Takes notice that it runs on another number of ranks."""


class Job(Protocol):
    """Ranks at work somewhere."""

    @property
    def id(self) -> int | None:
        """Its number with the job server."""

    @property
    def cluster(self) -> "Cluster | None":
        """Whose engines it runs on; None: nobody has it any more."""

    @property
    def engines(self) -> tuple[int, ...]:
        """The engine of each rank, now or in its last attempt; () before the first."""

    def events(self, after: int) -> Sequence[Event]:
        """What the job server says of it: events with greater numbers, oldest first."""

    @property
    def has_lost_rows(self) -> bool:
        """Whether metric rows are missing between others."""

    def watch(self, listener: Listener) -> Sequence[Any]:
        """Returns when it has ended: what each rank returned; nothing where none ever began.

        Raises:
            RunError: a rank failed.
        """

    def stop(self) -> None:
        """Asks every rank to end after its current step."""

    def pause(self) -> None:
        """Asks for a checkpoint, and for its engines back."""

    def resume(self) -> None:
        """Lets it go on from there, once engines are free."""

    def goes_on_as(self, experiment: Experiment) -> None:
        """Takes notice of what it does now; it is resumed as this."""
