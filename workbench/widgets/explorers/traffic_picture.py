"""What the traffic matrix draws: a cell for each pair of ranks, and the sums of each rank."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

import numpy as np
from numpy.typing import NDArray

from workbench.predict.traffic.givers import Table as Counts
from workbench.predict.traffic.pairs import Pairs
from workbench.widgets.explorers.colours import paint
from workbench.widgets.explorers.picture import Entry, Panel, Picture, Table
from workbench.widgets.explorers.plot import document, words
from workbench.widgets.explorers.reading import shortened
from workbench.widgets.units import size

Array = NDArray[np.float64]
ALL = "all"
MOST_CELLS = 32  # in a row; more ranks are put together
_EDGE, _MARGIN = 400, 46
_MOST_ROWS = 200


@dataclass(frozen=True, eq=False)
class Record:
    """What a run's ranks counted.

    Attributes:
        bytes: of a step, [taker, giver].
        steps: of which this is the mean.
    """

    bytes: Array
    steps: int


def of(
    name: str,
    world: int,
    shown: Sequence[Pairs],
    wanted: Mapping[str, str],
    record: Record | str = "",
) -> Picture:
    """The picture of some collectives.

    Args:
        name: of the model.
        world: number of ranks.
        shown: the collectives.
        wanted: what was chosen, for people.
        record: of the same collectives; or why there is none; "": nobody asks.
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
        taker, giver = np.unravel_index(int(whole.argmax()), whole.shape)
        said.append(
            f"Most goes from rank {giver} to rank {taker}: {size(whole[taker, giver])}. Rank "
            f"{got.argmax()} receives most, {size(got.max())}; rank {given.argmax()} sends most, "
            f"{size(given.max())}."
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
    taker, giver = np.unravel_index(int(np.abs(apart).argmax()), apart.shape)
    return (
        f"The run recorded {size(float(record.bytes.sum()))} a step in {steps}. They differ most "
        f"from rank {giver} to rank {taker}: {size(record.bytes[taker, giver])} instead of "
        f"{size(predicted[taker, giver])}. Predicted are steps of whole batches on one host; the "
        "last batch of an epoch may be short."
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
        words(_MARGIN + count * edge / 2, 12, "from rank", "middle"),
        f'<text transform="translate(12 {_MARGIN + count * edge / 2:.1f}) rotate(-90)" '
        f'text-anchor="middle" style="fill:{paint("faint")}">to rank</text>',
    ]
    every = max(1, -(-count // 16))
    for index in range(count):
        label = _ranks(index, per, world)
        middle = _MARGIN + (index + 0.5) * edge
        if index % every == 0:
            first = label.split(" ")[-1].split("–")[0]
            parts.append(words(middle, _MARGIN - 6, first, "middle"))
            parts.append(words(_MARGIN - 6, middle + 4, first, "end"))
    for row in range(count):
        for column in range(count):
            parts.append(_cell(row, column, float(blocks[row, column]), most, edge, per, world))
    svg = document("".join(parts), width, width)
    note = f"{per} ranks in a cell" if per > 1 else "arrow keys go from cell to cell"
    alt = "A cell for each pair of ranks; the darker, the more goes from its column to its row."
    legend = (Entry("nothing", "raised"), Entry("most", "blue", size(most if blocks.any() else 0)))
    return Panel(title, svg, alt, legend, note)


def _cell(
    row: int, column: int, count: float, most: float, edge: float, per: int, world: int
) -> str:
    x, y = _MARGIN + column * edge, _MARGIN + row * edge
    said = escape(f"{_ranks(column, per, world)} to {_ranks(row, per, world)}: {size(count)}")
    strength = 0.12 + 0.88 * count / most if count else 0.0
    place = f'x="{x:.1f}" y="{y:.1f}" width="{edge - 1:.1f}" height="{edge - 1:.1f}"'
    text = ""
    if count and edge >= 50:
        colour = "ground" if strength > 0.55 else "ink"
        text = words(x + edge / 2, y + edge / 2 + 4, size(count), "middle", colour)
        text = text.replace("<text", '<text font-size="10"')
    return (
        f'<g role="img" data-cell="{row},{column}" aria-label="{said}">'
        f'<rect {place} style="fill:{paint("raised")}"><title>{said}</title></rect>'
        f'<rect {place} style="fill:{paint("blue")};opacity:{strength:.3f}">'
        f"<title>{said}</title></rect>{text}</g>"
    )


def _sums(got: Array, given: Array) -> Panel:
    """What ranks receive and send, as bars."""
    number, pitch, left, wide = min(len(got), 16), 27, 54, 300
    most = max(float(got.max()), float(given.max()), 1.0)
    parts = []
    for rank in range(number):
        y = 4 + rank * pitch
        parts.append(words(left - 8, y + 15, f"rank {rank}", "end", "ink"))
        for shift, count, colour in ((0, got[rank], "blue"), (11, given[rank], "orange")):
            parts.append(
                f'<rect x="{left}" y="{y + shift}" width="{wide * count / most:.1f}" height="10" '
                f'style="fill:{paint(colour)}"/>'
            )
        text = f"{size(got[rank])} / {size(given[rank])}"
        parts.append(words(left + wide + 8, y + 15, text, colour="ink"))
    y = 4 + number * pitch
    if len(got) > number:
        parts.append(words(left, y + 10, f"and {len(got) - number:,} more ranks"))
        y += 16
    legend = (
        Entry("receives", "blue", f"{size(float(got.max()))} at most"),
        Entry("sends", "orange", f"{size(float(given.max()))} at most"),
    )
    svg = document("".join(parts), 470, y + 4)
    return Panel("By rank", svg, "Bytes that each rank receives and sends.", legend)


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
