"""What people ask of a run while it goes on, and what became of it: files in its directory.

    requests/0001.toml         the first request: a plan's text, [learning_rate] or [checkpoint]
    requests/0001.done.toml    when it was carried out, and what that took

Whoever asks for something writes a file; rank 0 looks once a step whether there is a new one, which
costs one look at the folder's date, and the ranks agree on it with the step's status. Requests are
carried out in their order, between two steps; of plans that wait, only the last.

The learning rate of every step follows from them,

    base ---- 0.1 from step 40 on ---- 0.05 from step 57 on ----

also of one that is run again after a fault: a run that goes on from a checkpoint is the one that
would have gone on without.
"""

import tomllib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from workbench.plan.experiment.experiment import Experiment
from workbench.plan.graph.graph import Graph
from workbench.plan.io.files import make_whole, write_whole
from workbench.plan.io.value import dump
from workbench.plan.plans.plan import Plan
from workbench.store.run_folder import FolderChanges

_FOLDER = "requests"


@dataclass(frozen=True)
class LearningRate:
    value: float


@dataclass(frozen=True)
class SaveNow:
    """The request for a checkpoint."""


RunRequest = Plan | LearningRate | SaveNow


@dataclass(frozen=True)
class CarriedOut:
    """What became of a request.

    Attributes:
        seconds: the seconds that it took on the slowest rank.
        received_bytes: the bytes of weights and optimizer state that a re-cut brought to each rank.
        before: the learning rate until then, if another was asked for.
    """

    step: int
    seconds: float = 0.0
    received_bytes: tuple[int, ...] = ()
    before: float | None = None


_CARRIED_OUT = TypeAdapter(CarriedOut)
_RATE = TypeAdapter(LearningRate)


class RunRequests:
    def __init__(self, directory: Path) -> None:
        self._folder = directory / _FOLDER
        self._changes, self._newest = FolderChanges(self._folder), 0

    def changed(self) -> bool:
        """Whether something may have been requested or carried out since this was last asked.

        Who asks for `newest`, which asks this, has another object for asking this.
        """
        try:
            return self._changes.seen()
        except FileNotFoundError:  # nothing was ever requested
            return False

    def newest(self) -> int:
        """The number of the last request; 0: there was none."""
        if self.changed():
            found = (path.name.split(".") for path in self._folder.glob("[0-9]*.toml"))
            self._newest = max((int(parts[0]) for parts in found if len(parts) == 2), default=0)
        return self._newest

    def last_carried_out(self) -> int:
        """The number of the last request that was carried out; 0: none was."""
        return max(self._done(), default=0)

    def in_force(self, experiment: Experiment) -> Experiment:
        """A run's experiment under the plan that it last went on under, whoever starts it again.

        Args:
            experiment: the experiment of this run, under any of its plans. One for another number
                of ranks than that plan stays as it is.

        Raises:
            PlanError: the plan's file is damaged.
        """
        for number in sorted(self._done(), reverse=True):
            request = self.read(number, experiment.plan.graph)
            if isinstance(request, Plan):
                if request.world_size != experiment.plan.world_size:
                    return experiment
                return experiment.replace(plan=_with_known(request, experiment.plan))
        return experiment

    def replanned_at(self) -> int:
        """The first step under the plan that a run has now; 0: it never had another one."""
        plans = (
            n for n in self._done() if not {"learning_rate", "checkpoint"} & self._content(n).keys()
        )
        return max((done.step for n in plans if (done := self.carried_out(n))), default=0)

    def submit(self, request: RunRequest) -> int:
        """Writes a request down; gives its number, which no other has."""
        self._folder.mkdir(exist_ok=True)
        for number in count(self.newest() + 1):
            path = self._folder / f"{number:04d}.toml"
            if make_whole(path, _text(request)):
                return number
        raise AssertionError("unreachable")

    def read(self, number: int, graph: Graph) -> RunRequest:
        """A request, of a run of this model.

        Raises:
            PlanError: a plan that is for another model, or no plan.
            ValueError: it says nothing that can be read.
        """
        content = self._content(number)
        if "learning_rate" in content:
            return _RATE.validate_python(content["learning_rate"])
        return SaveNow() if "checkpoint" in content else Plan.load(self._path(number), graph)

    def carry_out(self, number: int, found: CarriedOut) -> None:
        known = {name: value for name, value in asdict(found).items() if value is not None}
        write_whole(self._folder / f"{number:04d}.done.toml", dump({"carried_out": known}))

    def carried_out(self, number: int) -> CarriedOut | None:
        """What became of a request; None: it is not carried out yet, or a later plan was."""
        try:
            text = (self._folder / f"{number:04d}.done.toml").read_text()
            return _CARRIED_OUT.validate_python(tomllib.loads(text)["carried_out"])
        except (FileNotFoundError, KeyError, tomllib.TOMLDecodeError, ValidationError):
            return None

    def rates(self) -> Iterator[tuple[int, float, CarriedOut]]:
        """(number, learning rate, what became of it) of each that was carried out, in order."""
        yield from ((number, request.value, done) for number, request, done in self._small()
                    if isinstance(request, LearningRate))  # fmt: skip

    def saved(self) -> Iterator[tuple[int, CarriedOut]]:
        """(number, what became of it) of each checkpoint that was requested and written."""
        yield from ((n, done) for n, request, done in self._small() if isinstance(request, SaveNow))

    def _small(self) -> Iterator[tuple[int, LearningRate | SaveNow, CarriedOut]]:
        """Those that were carried out and are no plans."""
        for number in sorted(self._done()):
            content = self._content(number)
            done = self.carried_out(number)
            if done is None:
                continue
            if "learning_rate" in content:
                yield number, _RATE.validate_python(content["learning_rate"]), done
            elif "checkpoint" in content:
                yield number, SaveNow(), done

    def _path(self, number: int) -> Path:
        return self._folder / f"{number:04d}.toml"

    def _content(self, number: int) -> dict[str, Any]:
        return tomllib.loads(self._path(number).read_text())

    def _done(self) -> list[int]:
        return [int(path.name.split(".")[0]) for path in self._folder.glob("[0-9]*.done.toml")]


def _with_known(plan: Plan, known: Plan) -> Plan:
    """A plan from a text, with the own schemes that another plan has already at hand."""
    schemes = (choice.scheme for choice in known.layers.values() if choice.is_own)
    at_hand = {own.file: own for own in schemes if own.file}
    return plan.with_own(lambda own, _: at_hand.get(own.file, own))


def _text(request: RunRequest) -> str:
    match request:
        case Plan():
            return request.to_toml()
        case LearningRate():
            return dump({"learning_rate": asdict(request)})
        case SaveNow():
            return "[checkpoint]\n"


@dataclass(frozen=True)
class Change:
    """One request that was carried out: `value` since `step`, and `before` until then."""

    step: int
    value: float
    before: float


@dataclass(frozen=True)
class LearningRates:
    """What was requested, in that order.

    Attributes:
        changes: the changes that were carried out; where two are for one step, the later one
            counts.
    """

    base: float
    changes: tuple[Change, ...] = ()

    @classmethod
    def of(cls, base: float, requests: RunRequests) -> "LearningRates":
        """Those of a run, as its directory says.

        Args:
            base: the rate of its experiment, which may have another one by now.
        """
        changes = tuple(
            Change(done.step, value, base if done.before is None else done.before)
            for _, value, done in requests.rates()
        )
        return cls(changes[0].before if changes else base, changes)

    def at(self, step: int) -> float:
        due = [change.value for change in self.changes if change.step <= step]
        return due[-1] if due else self.base

    def then(self, step: int, value: float) -> tuple["LearningRates", CarriedOut]:
        """With another rate from a step on, and what is to be noted of that."""
        before = self.at(step)
        changed = LearningRates(self.base, (*self.changes, Change(step, value, before)))
        return changed, CarriedOut(step, before=before)
