"""The communication matrix: who sends how much to whom in a step, predicted and recorded."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import traitlets
from numpy.typing import NDArray

from workbench.plan.display import svg
from workbench.plan.io.errors import ExperimentError
from workbench.plan.io.html import Markup
from workbench.plan.io.units import shortened, size
from workbench.predict.prediction import Prediction, predict
from workbench.predict.traffic.collective_costs import Table as Counts
from workbench.predict.traffic.traffic import Pairs, pairs_of
from workbench.widgets.drawing import theme
from workbench.widgets.explorers.controls import Choice, Control
from workbench.widgets.explorers.explorer import Explorer, LegendEntry, Panel, Picture, Table

Array = NDArray[np.float64]
ALL = "all"
MOST_CELLS = 32  # in a row; more ranks are put together
_EDGE, _MARGIN = 400, 46
_MOST_ROWS = 200


@dataclass(frozen=True, eq=False)
class Record:
    """What a run's ranks counted.

    Attributes:
        bytes: bytes of a step, [receiver, sender].
        steps: number of steps of which this is the mean.
    """

    bytes: Array
    steps: int


@dataclass(frozen=True, eq=False)
class Recorded:
    """What all ranks of a run's last attempt counted.

    Attributes:
        world: number of ranks.
        steps: number of steps in which they counted.
        tables: bytes of a step that a rank received from another one, [receiver, sender], by
            collective and phase.
    """

    world: int
    steps: int
    tables: Mapping[tuple[str, str], NDArray[np.float64]]

    def table(self, op: str | None, phase: str | None) -> NDArray[np.float64]:
        """The sum over collectives and phases, or those of one; None: all."""
        whole = np.zeros((self.world, self.world))
        for (own_op, own_phase), table in self.tables.items():
            if op in (None, own_op) and phase in (None, own_phase):
                whole += table
        return whole


class TrafficMatrix(Explorer):
    """Bytes of a step from every rank to every other, exact, of all collectives or of some.

    With a run, what its ranks recorded stands beside what is predicted, once it has ended.

    Args:
        prediction: the prediction whose traffic is shown; or a run, the experiment of which is
            predicted as it is now.
        state: first values of the attributes.

    Attributes:
        prediction: the prediction; another one may be assigned, and is then shown alone.
        run: the run whose record is shown, or None.
        op: "all", or one collective: "all_gather", "all_reduce", ...
        phase: "all", "forward", "backward" or "step".
        layer: "all", or one layer, "gradients", "parameters", ...

    Raises:
        TypeError: neither a prediction nor a run.
        TraitError: a value that cannot be.
    """

    prediction = traitlets.Instance(Prediction)
    op = traitlets.Unicode(ALL)
    phase = traitlets.Unicode(ALL)
    layer = traitlets.Unicode(ALL)

    _leave: Callable[[], None] | None = None

    def __init__(self, prediction: Any, **state: Any) -> None:
        self._known: tuple[Prediction | None, tuple[Pairs, ...]] = (None, ())
        self.run = None if isinstance(prediction, Prediction) else prediction
        super().__init__(prediction=of_run(prediction), **state)
        self.observe(self._another, ["prediction"])
        if self.run is not None:
            self._leave = self.run.subscribe(self._went_on)

    @property
    def pairs(self) -> tuple[Pairs, ...]:
        """Of every collective.

        Raises:
            ExperimentError: more ranks than there are pairs counted for.
        """
        known, pairs = self._known
        if known is not self.prediction:
            pairs = pairs_of(self.prediction.program)
            self._known = self.prediction, pairs
        return pairs

    def moves(self) -> Sequence[Control]:
        """Which of the collectives are shown."""
        try:
            pairs = self.pairs
        except ExperimentError:
            return ()
        return tuple(
            Choice(name, label, {ALL: ALL, **{each: each for each in _values(pairs, name)}})
            for name, label in (("op", "collective"), ("phase", "phase"), ("layer", "layer"))
        )

    def picture(self) -> Picture:
        """The matrix, and its sums by rank.

        Raises:
            ValueError: the traffic of this experiment cannot be predicted.
        """
        try:
            pairs = self.pairs
        except ExperimentError as error:
            raise ValueError(str(error)) from None
        wanted = {"op": self.op, "phase": self.phase, "layer": self.layer}
        shown = [
            one
            for one in pairs
            if all(value in (ALL, getattr(one, name)) for name, value in wanted.items())
        ]
        plan = self.prediction.experiment.plan
        world = plan.world_size
        return traffic_picture(plan.graph.source.name, world, shown, wanted, self._record(world))

    def close(self) -> None:
        """Ends the view; its values stay readable."""
        if self._leave is not None:
            self._leave()
            self._leave = None
        super().close()

    def _record(self, world: int) -> Record | str:
        """What was recorded of what is chosen, or why there is nothing; "" without a run."""
        if self.run is None:
            return ""
        if self.layer != ALL:
            return "Ranks record by collective and phase; of one layer, the traffic is predicted."
        found = recorded(self.run)
        if found is None:
            return "What the run's ranks record shows here once it has ended."
        if found.world != world:
            return f"The run ended on {found.world} ranks; what these recorded is not compared."
        op, phase = (None if value == ALL else value for value in (self.op, self.phase))
        return Record(found.table(op, phase), found.steps)

    def _went_on(self, rows: Sequence[Any]) -> None:
        if not rows:  # its state has changed
            self._moved({})

    def _another(self, change: Mapping[str, Any]) -> None:
        with self.guard:
            self.run = None
            for name in ("op", "phase", "layer"):
                setattr(self, name, ALL)
            self._moved(change)

    @traitlets.validate("op", "phase", "layer")
    def _is_known(self, proposal: Mapping[str, Any]) -> str:
        name, value = proposal["trait"].name, proposal["value"]
        if value != ALL and value not in (known := _values(self.pairs, name)):
            raise traitlets.TraitError(f"{name} is {ALL}, {', '.join(known)}; got {value!r}")
        return str(value)


def traffic_picture(
    name: str,
    world: int,
    shown: Sequence[Pairs],
    wanted: Mapping[str, str],
    record: Record | str = "",
) -> Picture:
    """The picture of some collectives.

    Args:
        name: the model's name.
        world: number of ranks.
        shown: the collectives.
        wanted: what was chosen, for people.
        record: what was recorded of the same collectives; or why there is none; "": nobody asks.
    """
    whole = np.zeros((world, world))
    for one in shown:
        whole += one.bytes / one.every
    chosen = ", ".join(value for value in wanted.values() if value != ALL) or "all collectives"
    got, given = whole.sum(axis=1), whole.sum(axis=0)
    total = float(whole.sum())
    predicted = "are predicted to travel" if record else "travel"
    said = [f"In a step {size(total)} {predicted} between ranks, of {chosen}."]
    if total:
        receiver, sender = np.unravel_index(int(whole.argmax()), whole.shape)
        said.append(
            f"Most goes from rank {sender} to rank {receiver}: {size(whole[receiver, sender])}. "
            f"Rank {got.argmax()} receives most, {size(got.max())}; rank {given.argmax()} sends "
            f"most, {size(given.max())}."
        )
    else:
        said.append("None of these sends anything.")
    if any(one.op == "all_reduce" for one in shown):
        said.append(
            "All-reduces that are left to gloo or nccl are taken as direct ones: what those send "
            "to whom is not known, how much is."
        )
    tables = {"As predicted" if record else "Bytes of a step": whole}
    if isinstance(record, Record):
        tables["As recorded"] = record.bytes
        said.append(_compared(whole, record))
    elif record:
        said.append(record)
    most = max(float(folded(table)[1].max()) for table in tables.values()) or 1.0
    matrices = [_matrix(title, table, most) for title, table in tables.items()]
    title = f"{shortened(name, 60)}: who sends how much to whom, on {world:,} ranks"
    return Picture(title, tuple(said), (*matrices, _sums(got, given)), _table(shown))


def _compared(predicted: Array, record: Record) -> str:
    """Whether what was recorded is what is predicted, and where it differs most."""
    steps = "one step" if record.steps == 1 else f"{record.steps:,} steps"
    apart = record.bytes - predicted
    if not np.round(apart).any():
        return f"The run recorded exactly that, pair by pair, in {steps}."
    receiver, sender = np.unravel_index(int(np.abs(apart).argmax()), apart.shape)
    return (
        f"The run recorded {size(float(record.bytes.sum()))} a step in {steps}. They differ most "
        f"from rank {sender} to rank {receiver}: {size(record.bytes[receiver, sender])} instead of "
        f"{size(predicted[receiver, sender])}. Predicted are steps of whole batches on one host; "
        "the last batch of an epoch may be short."
    )


def folded(whole: Array) -> tuple[int, Array]:
    """Ranks in a cell, and the sums of so many, so that a row has few cells."""
    world = len(whole)
    per = -(-world // MOST_CELLS)
    if per == 1:
        return 1, whole
    starts = np.arange(0, world, per)
    return per, np.add.reduceat(np.add.reduceat(whole, starts, axis=0), starts, axis=1)


def _matrix(title: str, whole: Array, most: float) -> Panel:
    world, (per, blocks) = len(whole), folded(whole)
    count = len(blocks)
    edge = min(_EDGE / count, 64.0)
    width = _MARGIN + count * edge + 8
    parts = [
        theme.text(_MARGIN + count * edge / 2, 12, "from rank", "middle"),
        svg.upwards(12, _MARGIN + count * edge / 2, "to rank", style=theme.style(fill="faint")),
    ]
    every = max(1, -(-count // 16))
    for index in range(count):
        label = _ranks(index, per, world)
        middle = _MARGIN + (index + 0.5) * edge
        if index % every == 0:
            first = label.split(" ")[-1].split("–")[0]
            parts.append(theme.text(middle, _MARGIN - 6, first, "middle"))
            parts.append(theme.text(_MARGIN - 6, middle + 4, first, "end"))
    for row in range(count):
        for column in range(count):
            parts.append(_cell(row, column, float(blocks[row, column]), most, edge, per, world))
    note = f"{per} ranks in a cell" if per > 1 else "arrow keys go from cell to cell"
    alt = "A cell for each pair of ranks; the darker, the more goes from its column to its row."
    legend = (
        LegendEntry("nothing", "raised"),
        LegendEntry("most", "blue", size(most if blocks.any() else 0)),
    )
    return Panel(title, theme.document(parts, width, width), alt, legend, note)


def _cell(
    row: int, column: int, count: float, most: float, edge: float, per: int, world: int
) -> Markup:
    x, y = _MARGIN + column * edge, _MARGIN + row * edge
    said = f"{_ranks(column, per, world)} to {_ranks(row, per, world)}: {size(count)}"
    strength = 0.12 + 0.88 * count / most if count else 0.0
    looks = theme.style(fill="raised"), theme.style(fill="blue", opacity=f"{strength:.3f}")
    parts = [svg.rect(x, y, edge - 1, edge - 1, said, style=look) for look in looks]
    if count and edge >= 50:
        look = theme.style(fill="ground" if strength > 0.55 else "ink", font_size="10px")
        at = x + edge / 2, y + edge / 2 + 4
        parts.append(svg.text(*at, size(count), "middle", style=look))
    return svg.group(parts, role="img", data_cell=f"{row},{column}", aria_label=said)


def _sums(got: Array, given: Array) -> Panel:
    """What ranks receive and send, as bars."""
    number, pitch, left, wide = min(len(got), 16), 27, 54, 300
    most = max(float(got.max()), float(given.max()), 1.0)
    parts = []
    for rank in range(number):
        y = 4 + rank * pitch
        parts.append(theme.text(left - 8, y + 15, f"rank {rank}", "end", "ink"))
        for shift, count, color in ((0, got[rank], "blue"), (11, given[rank], "orange")):
            look = theme.style(fill=color)
            parts.append(svg.rect(left, y + shift, wide * count / most, 10, style=look))
        text = f"{size(got[rank])} / {size(given[rank])}"
        parts.append(theme.text(left + wide + 8, y + 15, text, color="ink"))
    y = 4 + number * pitch
    if len(got) > number:
        parts.append(theme.text(left, y + 10, f"and {len(got) - number:,} more ranks"))
        y += 16
    legend = (
        LegendEntry("receives", "blue", f"{size(float(got.max()))} at most"),
        LegendEntry("sends", "orange", f"{size(float(given.max()))} at most"),
    )
    drawing = theme.document(parts, 470, y + 4)
    return Panel("By rank", drawing, "Bytes that each rank receives and sends.", legend)


def _ranks(index: int, per: int, world: int) -> str:
    if per == 1:
        return f"rank {index}"
    return f"ranks {index * per}–{min(world, (index + 1) * per) - 1}"


def _table(shown: Sequence[Pairs]) -> Table:
    rows = sorted(
        ((float(one.bytes.sum() / one.every), one) for one in shown if one.bytes.any()),
        key=lambda pair: -pair[0],
    )
    told = tuple(
        (
            one.op,
            one.layer,
            one.phase,
            size(total),
            size(float(one.bytes.sum(axis=1).max() / one.every)),
            _partners(one.bytes),
        )
        for total, one in rows[:_MOST_ROWS]
    )
    head = ("collective", "layer", "phase", "all ranks", "of the fullest", "partners of a rank")
    return Table("Collectives of a step, the largest first", head, told)


def _partners(bytes_: Counts) -> str:
    """From how many others a rank receives."""
    counts = np.count_nonzero(bytes_, axis=1)
    least, most = int(counts.min()), int(counts.max())
    return str(most) if least == most else f"{least} to {most}"


def recorded(run: Any) -> Recorded | None:
    """What a run recorded; None while it goes on, or where it made no step.

    Args:
        run: a `Run`, the outcomes of which are read.
    """
    outcomes = run.outcomes
    if not outcomes or not outcomes[0].steps_counted:
        return None
    world, steps = len(outcomes), outcomes[0].steps_counted
    tables: dict[tuple[str, str], NDArray[np.float64]] = {}
    for receiver, outcome in enumerate(outcomes):
        for op, phase, sender, num_bytes in outcome.given:
            table = tables.setdefault((op, phase), np.zeros((world, world)))
            table[receiver, sender] += num_bytes / steps
    return Recorded(world, steps, tables)


def of_run(wanted: Any) -> Prediction:
    """A prediction as it is; of a run, its experiment's.

    Raises:
        TypeError: it is neither a prediction nor a run.
    """
    if isinstance(wanted, Prediction):
        return wanted
    experiment = getattr(wanted, "experiment", None)
    if experiment is None:
        raise TypeError(
            f"TrafficMatrix takes a Prediction or a Run, got {type(wanted).__name__}; "
            "wb.predict(plan, machine, experiment) makes the first"
        )
    return predict(experiment.plan, None, experiment)


def _values(pairs: Sequence[Pairs], name: str) -> list[str]:
    return list(dict.fromkeys(getattr(one, name) for one in pairs))
