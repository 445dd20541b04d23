"""What the evaluations of a run found: a line of JSON each, in its folder.

Rank 0 adds a line before the row of the step behind which it evaluated. A run that goes on from a
checkpoint evaluates anew what came after it: of a step, the last line counts.
"""

import json
import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter

from workbench.store.run_folder import complete_checkpoints

EVALUATIONS = "evaluations.jsonl"
_FIGURES = TypeAdapter(dict[str, float])


def add_evaluation(directory: Path, done: int, figures: Mapping[str, float]) -> None:
    """Adds what was found after `done` steps.

    Raises:
        OSError: the disk is full, or the folder is gone.
    """
    with (directory / EVALUATIONS).open("a", encoding="utf-8") as file:
        file.write(json.dumps({"done": done, **figures}) + "\n")


def read_evaluations(directory: Path) -> dict[int, dict[str, float]]:
    """Returns the figures by the number of steps that were done, in their order."""
    found: dict[int, dict[str, float]] = {}
    with suppress(FileNotFoundError):
        for line in (directory / EVALUATIONS).read_text("utf-8", "replace").splitlines():
            with suppress(ValueError):  # it is being written, or was cut off
                figures = _FIGURES.validate_json(line)
                found[int(figures.pop("done", 0))] = figures
    return dict(sorted(found.items()))


def last_evaluation(directory: Path) -> dict[str, float]:
    """The figures of the last one as a line about a run has them: "accuracy", "test_<other>"."""
    found = list(read_evaluations(directory).values())
    last = found[-1] if found else {}
    return {name if name == "accuracy" else f"test_{name}": last[name] for name in last}


@dataclass(frozen=True)
class Best:
    """The best evaluation so far.

    Attributes:
        done: the steps that were done before it; 0: there was none.
        value: its figure, of which a larger one is better.
    """

    done: int = 0
    value: float = -math.inf

    def then(self, done: int, figures: Mapping[str, float], by: str) -> "Best":
        """The better one of this and another; this one, where the other is no better."""
        value = worth(figures, by)
        return Best(done, value) if value > self.value else self

    @classmethod
    def of(cls, directory: Path, by: str, before: int | None = None) -> "Best":
        """The best one in a run's folder whose checkpoint is there.

        Args:
            directory: the folder.
            by: what is best, as `Experiment.keep_best` has it.
            before: the number of steps after which none counts; None: all do.
        """
        best, there = cls(), complete_checkpoints(directory)
        for done, figures in read_evaluations(directory).items():
            if done in there and (before is None or done <= before):
                best = best.then(done, figures, by)
        return best


def worth(figures: Mapping[str, float], by: str) -> float:
    """The figure by which evaluations are compared; the larger one is better, NaN never is."""
    is_least = by == "loss" or by.startswith("-")
    value = figures.get(by.removeprefix("-"), math.nan)
    return -value if is_least else value
