"""How far a benchmark is, how long it goes on, and which of its parts it runs.

A benchmark says what its parts are, and takes their rounds or cases from here:

    progress.begin(Part("rounds", 7, seconds=60), Part("grid", 18, seconds=20))
    for index in progress.each("rounds"):
        ...
        yield the report of all results so far

Each is announced with the time that is left. Within a budget there are as many as fit: one at least
of the first part, and none of a part for which no time is left. Time that one part leaves goes to
the later ones.
"""

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any


class UnknownPartError(ValueError):
    """A benchmark has no part of this name; says which it has."""


@dataclass(frozen=True)
class Part:
    """So many rounds or cases of one kind, and the seconds of one, roughly.

    Seconds are corrected as units are done.
    """

    name: str
    units: int
    seconds: float


@dataclass
class Progress:
    """The progress of one benchmark, within a budget, of all its parts or only one."""

    budget_s: float | None = None
    only: str | None = None
    say: Callable[[str], None] = lambda line: print(line, file=sys.stderr, flush=True)
    now: Callable[[], float] = time.monotonic
    _parts: dict[str, Part] = field(default_factory=dict, init=False)
    _taken: dict[str, list[float]] = field(default_factory=dict, init=False)
    _ended: set[str] = field(default_factory=set, init=False)
    _began: float = field(default=0.0, init=False)

    def begin(self, *parts: Part) -> None:
        """Begins a benchmark of these parts, in this order.

        Raises:
            UnknownPartError: there is no part of the name in `only`.
        """
        if self.only is not None and self.only not in [part.name for part in parts]:
            known = ", ".join(part.name for part in parts)
            raise UnknownPartError(f"there is no part {self.only!r}: {known}")
        self._parts = {part.name: part for part in parts if self.only in (None, part.name)}
        self._taken = {name: [] for name in self._parts}
        self._ended, self._began = set(), self.now()

    def wants(self, part: str) -> bool:
        """Whether a part runs."""
        return part in self._parts

    def each(self, part: str, items: Iterable[Any] | None = None) -> Iterator[Any]:
        """The rounds, or cases, of a part that fit into the budget; none if it is not wanted."""
        if part not in self._parts:
            return
        units, taken = self._parts[part].units, self._taken[part]
        allotted = self._allotted(part)
        for number, item in enumerate(range(units) if items is None else items):
            if self._is_too_late(part, allotted):
                break
            named = f" {item}" if isinstance(item, str) else ""
            self.tell(f"{part} {number + 1}/{units}{named}")
            began = self.now()
            yield item
            taken.append(self.now() - began)
        self._ended.add(part)

    def tell(self, what: str) -> None:
        """Announces the next unit, with the time so far and the time that is left."""
        minutes, seconds = divmod(int(self.now() - self._began), 60)
        left = self._left_s()
        rest = f"{left / 60:.0f} min" if left > 90 else f"{left:.0f} s"
        self.say(f"[{minutes}:{seconds:02}, some {rest} left] {what}")

    def fitting(self, most: int, least: int = 2) -> int:
        """How many rounds within one unit the budget allows, for systems that stay in memory."""
        if self.budget_s is None:
            return most
        share = self.budget_s / max(sum(p.units * p.seconds for p in self._parts.values()), 1e-9)
        return max(least, min(most, int(most * share)))

    def notes(self) -> tuple[str, ...]:
        """The parts and units that were left out."""
        short = [
            f"{len(taken)} of {self._parts[name].units} of {name}"
            for name, taken in self._taken.items()
            if len(taken) < self._parts[name].units
        ]
        only = () if self.only is None else (f"Only the part {self.only}.",)
        return (*only, f"Not all was run: {', '.join(short)}.") if short else only

    def _allotted(self, part: str) -> float:
        """The seconds of a part: its share of what is left of the budget."""
        if self.budget_s is None:
            return float("inf")
        coming = {n: p.units * p.seconds for n, p in self._parts.items() if n not in self._ended}
        left = self.budget_s - (self.now() - self._began)
        return left * coming[part] / max(sum(coming.values()), 1e-9)

    def _is_too_late(self, part: str, allotted: float) -> bool:
        """Whether one more of a part does not fit any more."""
        taken = self._taken[part]
        if taken:
            return sum(taken) * (1 + 1 / len(taken)) > allotted
        if self.budget_s is None or not any(self._taken.values()):
            return False
        expected = self._parts[part].seconds * self._slower()
        return self.now() - self._began + expected > self.budget_s

    def _slower(self) -> float:
        """How many times as long as was thought all has taken so far."""
        guessed = sum(len(taken) * self._parts[name].seconds for name, taken in self._taken.items())
        return sum(map(sum, self._taken.values())) / guessed if guessed else 1.0

    def _left_s(self) -> float:
        left, slower = 0.0, self._slower()
        for name, part in self._parts.items():
            if name not in self._ended:
                taken = self._taken[name]
                each = sum(taken) / len(taken) if taken else part.seconds * slower
                left += max(part.units - len(taken), 0) * each
        if self.budget_s is None:
            return left
        return max(min(left, self.budget_s - (self.now() - self._began)), 0.0)
