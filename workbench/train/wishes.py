"""Plans that a run is wished to go on under, and what became of them: files in its directory.

    plans/0001.toml         the first wish, as a plan's text
    plans/0001.done.toml    when it was carried out, how long that took, and what it moved

Whoever wishes writes; rank 0 looks whether there is something new once a step, which costs one
look at the folder's date, and the ranks agree on it with the step's status.
"""

import os
import tomllib
from dataclasses import asdict, dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from workbench.plan.experiment import Experiment
from workbench.plan.graph import Graph
from workbench.plan.plan import Plan
from workbench.plan.text import dump

_FOLDER = "plans"


@dataclass(frozen=True)
class CarriedOut:
    """A plan that a run went on under.

    Attributes:
        step: steps made before it.
        seconds: that the re-cut took, on the slowest rank.
        received_bytes: of weights and optimizer state, on each rank.
    """

    step: int
    seconds: float
    received_bytes: tuple[int, ...]


_CARRIED_OUT = TypeAdapter(CarriedOut)


class PlanWishes:
    """The wishes for one run.

    Args:
        directory: of the run.
    """

    def __init__(self, directory: Path) -> None:
        self._folder = directory / _FOLDER
        self._changed_at, self._newest = -1, 0

    def newest(self) -> int:
        """The number of the last wish; 0: there was none."""
        try:
            changed_at = os.stat(self._folder).st_mtime_ns
        except FileNotFoundError:
            return 0
        if changed_at != self._changed_at:
            self._changed_at = changed_at
            found = (path.name.split(".") for path in self._folder.glob("[0-9]*.toml"))
            self._newest = max((int(parts[0]) for parts in found if len(parts) == 2), default=0)
        return self._newest

    def last_carried_out(self) -> int:
        """The number of the last wish that was carried out; 0: none was."""
        names = (path.name for path in self._folder.glob("[0-9]*.done.toml"))
        return max((int(name.split(".")[0]) for name in names), default=0)

    def in_force(self, experiment: Experiment) -> Experiment:
        """A run's experiment under the plan that it last went on under, whoever starts it again.

        Args:
            experiment: of this run, under any of its plans. One for another number of ranks than
                that plan stays as it is.

        Raises:
            PlanError: the plan's file is damaged.
        """
        if not (number := self.last_carried_out()):
            return experiment
        plan = self.plan(number, experiment.plan.graph)
        fits = plan.world_size == experiment.plan.world_size
        return experiment.replace(plan=plan) if fits else experiment

    def wish(self, plan: Plan) -> int:
        """Writes a plan down; gives its number."""
        self._folder.mkdir(exist_ok=True)
        number = self.newest() + 1
        _write(self._folder / f"{number:04d}.toml", plan.to_toml())
        return number

    def plan(self, number: int, graph: Graph) -> Plan:
        """The plan of a wish.

        Raises:
            PlanError: it is for another model, or no plan.
        """
        return Plan.load(self._folder / f"{number:04d}.toml", graph)

    def carry_out(self, number: int, found: CarriedOut) -> None:
        """Notes that a wish was carried out."""
        _write(self._folder / f"{number:04d}.done.toml", dump({"carried_out": asdict(found)}))

    def carried_out(self, number: int) -> CarriedOut | None:
        """What became of a wish; None: it was not carried out yet, or a later one was instead."""
        try:
            text = (self._folder / f"{number:04d}.done.toml").read_text()
            return _CARRIED_OUT.validate_python(tomllib.loads(text)["carried_out"])
        except (FileNotFoundError, KeyError, tomllib.TOMLDecodeError, ValidationError):
            return None


def _write(path: Path, text: str) -> None:
    part = path.with_name(f".{path.name}.part")
    part.write_text(text)
    part.replace(path)
