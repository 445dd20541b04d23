"""Where a run stands, in one line's worth of values."""

import math
from dataclasses import asdict, dataclass
from typing import Any

from workbench.widgets.dashboard.run import ENDED, Run
from workbench.widgets.dashboard.series import Series
from workbench.widgets.units import duration


@dataclass(frozen=True)
class Status:
    """Where a run stands.

    Attributes:
        state: the run's own word.
        stopping: whether it was asked to stop and has not ended yet.
        done: steps that every rank has reported.
        steps: those of the whole experiment.
        elapsed_s: seconds since the first step's report.
        left_s: seconds to go at the recent speed; None where that is unknown or nothing.
        accuracy: the last one measured on the test split.
        error: why it failed, or "".
        reason: why it waits, or "".
        lr: its learning rate; None: unknown.
        notes: what else should be known.
    """

    state: str = "starting"
    stopping: bool = False
    done: int = 0
    steps: int = 0
    elapsed_s: float = 0.0
    left_s: float | None = None
    accuracy: float | None = None
    error: str = ""
    reason: str = ""
    lr: float | None = None
    notes: tuple[str, ...] = ()

    @classmethod
    def of(cls, run: Run, series: Series, state: str) -> "Status":
        """Puts together what a run says of itself and what its series say.

        `state` is the run's, as it was before the series were read.
        """
        ended, steps = state in ENDED, run.experiment.steps
        left_s = (steps - series.done) * series.seconds_per_step
        error = run.error
        return cls(
            state=state,
            stopping=run.is_stopping and not ended,
            done=series.done,
            steps=steps,
            elapsed_s=series.elapsed_s,
            left_s=None if ended or not math.isfinite(left_s) else left_s,
            accuracy=series.accuracy if math.isfinite(series.accuracy) else None,
            error="" if error is None else str(error) or type(error).__name__,
            reason=run.reason,
            lr=getattr(getattr(run.experiment, "optimizer", None), "lr", None),
            notes=tuple(run.notes),
        )

    @property
    def ended(self) -> bool:
        """Whether nothing will change any more."""
        return self.state in ENDED

    @property
    def advice(self) -> str:
        """What to do next, for a run that failed."""
        if self.state != "failed":
            return ""
        if "cluster.restart()" in self.error or "Cluster.attach" in self.error:
            return (
                "The picture is the last one. cluster.restart(), or wb.Cluster.attach(name) after "
                "a kernel's restart, starts engines that go on with its jobs; this view follows "
                "the job again, or dashboard.run = cluster.jobs[id] has it do so."
            )
        return (
            "Nothing that was measured is lost: run.metrics has every step so far, and "
            "run.directory the last checkpoint. print(run.error) shows the whole message; once "
            "its cause is gone, Resume goes on from there."
        )

    def as_dict(self) -> dict[str, Any]:
        """The values by name, as JSON can hold them."""
        told = asdict(self)
        del told["notes"]  # they are among the events
        return {**told, "ended": self.ended, "advice": self.advice}

    def __str__(self) -> str:
        elapsed = f"{duration(self.elapsed_s)} elapsed"
        parts = [self.state, f"{self.done} of {self.steps} steps", elapsed]
        if self.left_s is not None:
            parts.append(f"{duration(self.left_s)} left")
        if self.accuracy is not None:
            parts.append(f"test accuracy {100 * self.accuracy:.1f} %")
        return ", ".join(parts)
