"""Programs for people: one line for each instruction, and the same as a table in HTML."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from workbench.plan.experiment.experiment import Experiment
from workbench.plan.extension.extension import name_of
from workbench.plan.io.html import Markup, element, frame_of, table
from workbench.program.collectives import CollectiveCall, Collectives
from workbench.program.instructions import (
    Adjust,
    Agree,
    Average,
    Backward,
    Clip,
    Convert,
    Correct,
    Forward,
    HandOut,
    Instruction,
    KeepWeights,
    Load,
    Loss,
    Pass,
    Prefetch,
    Recompute,
    Reduce,
    Rescale,
    Unscale,
    Update,
    Wait,
    Weigh,
    ZeroGrad,
    turn_of,
)
from workbench.program.operations import Operation
from workbench.program.rows import Representatives, Rows

if TYPE_CHECKING:
    import pandas

_MOST_RANKS = 8
_HEAD = ("", "instruction", "of", "how", "communicates", "when")


class Line(NamedTuple):
    """One instruction."""

    number: str
    word: str
    of: str
    how: str = ""
    communicates: str = ""
    when: str = ""


@dataclass(frozen=True)
class ProgramDisplay:
    """What is shown of a program.

    Attributes:
        rank: the only rank whose instructions are shown; None: those of all.
        column: the one that stands for this rank, of the ranks that are written for.
    """

    experiment: Experiment
    ranks: Representatives
    instructions: Sequence[Instruction]
    collectives: Collectives
    rank: int | None = None
    column: int | None = None

    @property
    def title(self) -> str:
        experiment, world = self.experiment, self.ranks.world_size
        plan, sync = experiment.plan, experiment.sync
        said = [sync.shown]
        if plan.rounds != "BK":
            said.append(f"rounds {plan.rounds}")
        if experiment.accumulate > 1:
            said.append(f"{experiment.accumulate} micro-batches")
        if experiment.shard_optimizer:
            said.append("fused updates of parts" if experiment.fused else "updates of parts")
        where = f"{world:,} ranks" if self.rank is None else f"rank {self.rank} of {world:,}"
        if self.rank is None and len(self.ranks.ranks) < world:
            where += f", for which {len(self.ranks.ranks)} stand"
        return (
            f"{plan.graph.source.name} on {where}: {', '.join(said)}, "
            f"{len(self.instructions):,} instructions"
        )

    def text(self) -> str:
        lines = list(self.lines())
        widths = [max(len(cell) for cell in column) for column in zip(*lines, strict=True)]
        rows = []
        for line in lines:
            cells = [line.number.rjust(widths[0])]
            cells += [c.ljust(n) for c, n in zip(line[1:], widths[1:], strict=True)]
            rows.append("  ".join(cells).rstrip())
        return "\n".join([self.title, *rows])

    def html(self) -> Markup:
        lines = table(_HEAD, self.lines())
        return element(
            "div",
            element("p", element("b", self.title)),
            element("div", lines, style="max-height:40em;overflow:auto"),
        )

    def frame(self) -> "pandas.DataFrame":
        rows = ({**line._asdict(), "number": int(line.number)} for line in self.lines())
        return frame_of(rows, Line._fields)

    def lines(self) -> Iterator[Line]:
        """Of one rank, those in which it takes part."""
        for index, instruction in enumerate(self.instructions):
            calls = list(self.collectives.of(instruction))
            alone = isinstance(instruction, Reduce | HandOut | Average)
            if alone and not any(self._takes(call) for call in calls):
                continue
            of, how, when = self._said(index, instruction)
            every = turn_of(instruction)
            if every > 1 and not isinstance(instruction, Average):
                when += f"{', ' if when else ''}every {every} steps"
            communicates = ", ".join(self._call(call) for call in calls if self._takes(call))
            yield Line(str(index), instruction.word, of, how, communicates, when)

    def _said(self, index: int, instruction: Instruction) -> tuple[str, str, str]:
        """(of what, how, when)."""
        match instruction:
            case Load(rows):
                return self._rows(rows), "", ""
            case Weigh():
                return "weights of rows", "", ""
            case ZeroGrad(names) | KeepWeights(names):
                return _several(names), "", ""
            case Adjust(names) | Correct(names):
                return _several(names), self.experiment.sync.shown, ""
            case Prefetch(operation, on):
                return _conversion(operation), "where no memory is shared", self._when(on)
            case Forward(operation, on):
                return operation.label, self._scheme(operation), self._when(on)
            case Convert(operation, on, direction):
                step = operation.step
                return (
                    _conversion(operation, back=direction == "backward"),
                    "" if step is None else f"{step.source} to {step.target}",
                    f"{direction}, {self._when(on)}",
                )
            case Loss(results, on):
                return _several([name for name, _ in results]), "", self._when(on)
            case Recompute(_, operations, on):
                labels = [operation.label for operation in operations]
                return _several(list(dict.fromkeys(labels))), "", self._when(on)
            case Backward(operation, on, adds):
                how = "adds to gradients" if adds else ""
                return operation.label, how, self._when(on)
            case Reduce(column, _, to, algorithm, codec, after):
                how = name_of(algorithm) + ("" if codec is None else f", {codec.name}")
                how = how if to == "holders" else f"to the {to}"
                held = [n for b in column.of_place if b is not None for n in b.names]
                awaited = self._awaited.get(index)
                place = None if self.column is None else int(column.place[self.column])
                last = max(after) if place is None else after[place]
                when = f"after {last}" if last >= 0 else ""
                when += f"{', ' if when else ''}awaited by {awaited}" * (awaited is not None)
                return _several(list(dict.fromkeys(held))), how, when
            case Wait(reduces, late):
                ago = f"of {late} step{'s' * (late > 1)} ago" if late else ""
                return f"reduce {_span(reduces)}", ago, ""
            case Rescale(names, on):
                over = "rows of its shard group" if on is None else self._when(on)
                return _several(names), f"mean over {over}", ""
            case Agree():
                return "loss, stop, requests", "", ""
            case Unscale(names):
                return _several(names), "nothing follows unless all are numbers", ""
            case Clip(names, norm, value):
                how = f"value {value:g}" if norm is None else f"norm {norm:g}"
                return _several(names), how, ""
            case Update(names, by):
                kind = self.experiment.optimizer.kind
                return _several(names), kind if by == "holders" else f"{kind}, by {by}", ""
            case HandOut(_, source, fused):
                return "parameters", f"from the {source}" + ", fused" * fused, ""
            case Average(_, every):
                return "parameters", f"every {every} steps" if every > 1 else "every step", ""

    @cached_property
    def _awaited(self) -> dict[int, int]:
        """For each reduction, the instruction that waits for it."""
        return {
            begun: index
            for index, instruction in enumerate(self.instructions)
            if isinstance(instruction, Wait)
            for begun in instruction.reduces
        }

    def _scheme(self, operation: Operation) -> str:
        choice = self.experiment.plan.layers.get(operation.label)
        if choice is None:
            return str(operation.layout)
        return f"{choice.name} {choice.group_size}"

    def _when(self, on: Pass) -> str:
        return str(on) if on.round is None else f"{on}: {self._rows(on.rows)}"

    def _rows(self, rows: Rows) -> str:
        own = rows.own if self.column is None else rows.own[[self.column]]
        if len(own) > _MOST_RANKS:
            return f"{own.min()} to {own.max()} rows a rank"
        return f"{' '.join(map(str, own.tolist()))} rows"

    def _takes(self, call: CollectiveCall) -> bool:
        if call.takes is None:
            return True
        return bool(call.takes.any() if self.column is None else call.takes[self.column])

    def _call(self, call: CollectiveCall) -> str:
        numel = call.numel if call.takes is None else call.numel * call.takes
        count = int(np.max(numel) if self.column is None else numel[self.column])
        return f"{call.op} {count:,}"


def _conversion(operation: Operation, *, back: bool = False) -> str:
    (read,) = operation.reads
    ends = (read[0], operation.label)
    return " -> ".join(reversed(ends) if back else ends)


def _several(names: Sequence[str]) -> str:
    """The first and the last one, and how many there are."""
    if len(names) <= 3:
        return ", ".join(names)
    return f"{names[0]} .. {names[-1]} ({len(names)})"


def _span(indices: Sequence[int]) -> str:
    if len(indices) > 1 and indices[-1] - indices[0] == len(indices) - 1:
        return f"{indices[0]}-{indices[-1]}"
    return " ".join(map(str, indices))
