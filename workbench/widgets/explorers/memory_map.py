"""The memory map: what a rank holds at its peak, by category and layer, to scale."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

import traitlets

from workbench.plan.display import svg
from workbench.plan.io.html import Markup, joined
from workbench.plan.io.units import shortened, size
from workbench.plan.machine.machine import Machine
from workbench.predict.memory.memory import RankMemory
from workbench.predict.memory.timeline import CATEGORIES, Category
from workbench.predict.prediction import Prediction
from workbench.widgets.drawing import theme
from workbench.widgets.drawing.treemap import Box, squarified
from workbench.widgets.explorers.controls import Button, Choice, Control, Slider
from workbench.widgets.explorers.explorer import Explorer, LegendEntry, Panel, Picture, Table

WIDTH, HEIGHT = 960, 420
_HEADING = 17
_LETTER = 6.4  # width of one in a label
MOST_TILES = 400
MOST_RANKS = 24

# Two of one color are told apart by their labels; they are never large together.
LOOKS: Mapping[Category, str] = {
    "weights": "blue",
    "gradients": "vermilion",
    "buckets": "orange",
    "in_flight": "orange",
    "codec": "gray",
    "optimizer": "purple",
    "staging": "gray",
    "data": "gray",
    "activations": "green",
    "activation_gradients": "sky",
    "workspace": "gray",
}
Held = Mapping[tuple[Category, str], int]


class MemoryMap(Explorer):
    """A prediction's memory as areas: by category and layer, of one rank, at its peak.

    Args:
        prediction: the prediction whose memory is shown; with a machine, its devices' memory is the
            limit.
        state: first values of the attributes.

    Attributes:
        prediction: the prediction; another one may be assigned.
        rank: the rank whose memory is shown; it begins with the fullest.
        by: what areas are put together by: "category" or "layer".
        inside: one category or layer that is shown alone; "": all.

    Raises:
        TypeError: no prediction.
        TraitError: a value that cannot be.
    """

    prediction = traitlets.Instance(Prediction)
    rank = traitlets.Int(0)
    by = traitlets.Enum(("category", "layer"), "category")
    inside = traitlets.Unicode()

    def __init__(self, prediction: Prediction, **state: Any) -> None:
        require(prediction, "MemoryMap")
        super().__init__(**{"prediction": prediction, "rank": _fullest(prediction), **state})
        self.observe(self._another, ["prediction"])
        self.observe(self._moved, ["inside"])

    def moves(self) -> Sequence[Control]:
        """The rank, how areas are put together, and a way out of one of them."""
        ranks = range(self._world)
        whole = Button("whole", "Show all", "" if self.inside else "all is shown")
        order = Choice("by", "areas by", {"category, then layer": "category",
                                          "layer, then category": "layer"})  # fmt: skip
        return (Slider("rank", "rank", ranks, str), order, whole)

    def picture(self) -> Picture:
        """Two drawings: the rank's areas, and the peaks of all ranks."""
        memory = self.prediction.memory
        rank = memory[self.rank]
        known = grouped({k: n for k, n in rank.held.items() if n}, self.by)
        inside = self.inside if self.inside in known else ""
        peaks = [each.peak_bytes for each in memory.ranks]
        name = self.prediction.experiment.plan.graph.source.name
        return rank_picture(rank, peaks, self.by, inside, self.prediction.machine, name)

    def press(self, name: str) -> None:
        """Shows everything again."""
        if name != "whole":
            super().press(name)
        self.inside = ""

    def pick(self, name: str) -> None:
        """Looks into a group of areas, and back; or at another rank."""
        if name.startswith("rank ") and name[5:].isdecimal():
            self.rank = int(name[5:])
        else:
            self.inside = "" if self.inside == name else name

    @property
    def _world(self) -> int:
        return self.prediction.experiment.plan.world_size

    def _another(self, change: Mapping[str, Any]) -> None:
        with self.guard:
            if self.rank >= self._world:
                self.rank = _fullest(self.prediction)
            self.inside = ""
            self._moved(change)

    @traitlets.validate("rank")
    def _is_a_rank(self, proposal: Mapping[str, Any]) -> int:
        rank: int = proposal["value"]
        if not 0 <= rank < self._world:
            raise traitlets.TraitError(f"rank must be 0 to {self._world - 1}, got {rank}")
        return rank


def rank_picture(
    rank: RankMemory, peaks: Sequence[int], by: str, inside: str, machine: Machine | None, name: str
) -> Picture:
    """The picture of one rank.

    Args:
        rank: the memory of the rank, as predicted.
        peaks: the peaks of all ranks, in bytes.
        by: what tiles are put together by first: "category" or "layer".
        inside: one category or layer that is shown alone; "": all.
        machine: the machine whose devices' memory is the limit, or None.
        name: the model's name.
    """
    held = {key: count for key, count in rank.held.items() if count > 0}
    groups = grouped(held, by)
    if inside:
        groups = {inside: groups[inside]}
    total = sum(sum(tiles.values()) for tiles in groups.values())
    of_all = f", of it {inside} {size(total)}" if inside else ""
    categories = {kind: count for kind, count in rank.categories.items() if count}
    legend = tuple(
        LegendEntry(_words(kind), LOOKS[kind], size(categories[kind]))
        for kind in CATEGORIES
        if kind in categories
    )
    most = max(CATEGORIES, key=lambda kind: categories.get(kind, 0))
    said = (
        f"Rank {rank.rank} holds most in the {rank.moment}: {size(rank.peak_bytes)}{of_all}. "
        f"Most of it is {_words(most)}, {size(categories.get(most, 0))}.",
        *_limit(rank, machine),
    )
    alt = f"Tensors of rank {rank.rank} at its peak; areas are bytes."
    panels = (
        Panel(
            f"Rank {rank.rank} at its peak",
            tiles_svg(groups, by),
            alt,
            legend,
            size(total),
            wide=True,
        ),
        _ranks_panel(peaks, rank.rank, machine),
    )
    return Picture(
        f"Memory of {shortened(name, 60)} on {len(peaks):,} ranks", said, panels, _table(held, by)
    )


def grouped(held: Held, by: str) -> dict[str, dict[tuple[Category, str], int]]:
    """Tiles by what they are put together by, the largest first."""

    def group(key: tuple[Category, str]) -> str:
        return key[0] if by == "category" else key[1]

    whole: dict[str, int] = {}
    for key, count in held.items():
        whole[group(key)] = whole.get(group(key), 0) + count
    order = sorted(held, key=lambda key: (-whole[group(key)], group(key), -held[key]))
    return {name: {key: held[key] for key in keys} for name, keys in groupby(order, key=group)}


def tiles_svg(groups: Mapping[str, Mapping[tuple[Category, str], int]], by: str) -> Markup:
    """Boxes of groups, each with the boxes of its tiles; areas of tiles in a group are to scale."""
    outer = squarified([sum(tiles.values()) for tiles in groups.values()], Box(0, 0, WIDTH, HEIGHT))
    parts, left = [], MOST_TILES
    for (name, tiles), box in zip(groups.items(), outer, strict=True):
        total = sum(tiles.values())
        shown = dict(list(tiles.items())[: max(left, 0)])
        left -= len(shown)
        rest = total - sum(shown.values())
        headed = box.height > 2.2 * _HEADING and box.width > 40
        inner = box.within(1.5, _HEADING if headed else 1.5, 1.5)
        counts = [*shown.values(), *([rest] if rest else [])]
        boxes = squarified(counts, inner) if inner.area else []
        group = name if by == "layer" else _words(name)
        said = f"{group}: {size(total)}, {len(tiles)} tensors; choose to look into it"
        drawn = [_area(box, said, fill="raised", stroke="ground")]
        if headed:
            room = int((box.width - 10) / _LETTER)
            heading = _fit(f"{group} {size(total)}", room)
            drawn.append(theme.text(box.x + 5, box.y + 13, heading, color="ink"))
        drawn += [
            _tile(key, count, tile, by)
            for (key, count), tile in zip(shown.items(), boxes, strict=False)
        ]
        if rest and boxes:
            smaller = f"{len(tiles) - len(shown)} smaller ones: {size(rest)}"
            drawn.append(_area(boxes[-1], smaller, fill="gray", opacity=0.5))
        parts.append(_button(name, said, drawn))
    return theme.document(parts, WIDTH, HEIGHT)


def _button(name: str, said: str, parts: Iterable[Markup]) -> Markup:
    """A part of a drawing that can be chosen, by its name."""
    return svg.group(parts, role="button", data_cell=name, data_pick=name, aria_label=said)


def _area(box: Box, said: str, **look: str | float) -> Markup:
    return svg.rect(box.x, box.y, box.width, box.height, said, style=theme.style(**look))


def _tile(key: tuple[Category, str], count: int, box: Box, by: str) -> Markup:
    kind, layer = key
    name = (layer or "the step") if by == "category" else _words(kind)
    said = f"{layer or 'the step'}, {_words(kind)}: {size(count)}"
    drawn = _area(box, said, fill=LOOKS[kind], stroke="ground", stroke_width=1)
    room = int((box.width - 6) / _LETTER)
    if box.height < 15 or room < 4:
        return drawn
    lines = [name] if box.height < 30 else [name, size(count)]
    return joined(
        [
            drawn,
            *(
                svg.text(box.x + 4, box.y + 12 + 14 * index, _fit(line, room), style=_HALO)
                for index, line in enumerate(lines)
            ),
        ]
    )


# White letters with a dark rim are read on every color of either theme.
_HALO = "fill:#fff;stroke:#000;stroke-opacity:0.55;stroke-width:2.4;paint-order:stroke"


def _ranks_panel(peaks: Sequence[int], shown: int, machine: Machine | None) -> Panel:
    """The peaks of ranks as bars, of many the first ones."""
    number = min(len(peaks), MOST_RANKS)
    limits = [machine.device(rank).memory_bytes if machine else 0 for rank in range(number)]
    full = max([*peaks[:number], *limits, 1])
    pitch, left, wide = 20, 54, 470 - 54 - 165
    parts = []
    for rank in range(number):
        y, over = 4 + rank * pitch, bool(limits[rank]) and peaks[rank] > limits[rank]
        color = "vermilion" if over else "blue" if rank == shown else "sky"
        text = size(peaks[rank]) + (f" of {size(limits[rank])}" if limits[rank] else "")
        said = f"rank {rank}: {text}{', over budget' if over else ''}"
        of_name = "ink" if rank == shown else "faint"
        drawn = [
            _area(Box(left, y, wide, 15), "", fill="raised"),
            _area(Box(left, y, wide * peaks[rank] / full, 15), said, fill=color),
            theme.text(left - 8, y + 12, f"rank {rank}", "end", of_name),
            theme.text(left + wide + 8, y + 12, text + (" over!" if over else ""), color="ink"),
        ]
        if limits[rank]:
            mark = f"M{left + wide * limits[rank] / full:.1f} {y - 1}v17"
            drawn.append(svg.path(mark, style=theme.style(stroke="ink", stroke_width=2)))
        parts.append(_button(f"rank {rank}", said, drawn))
    y = 4 + number * pitch
    if len(peaks) > number:
        parts.append(theme.text(left, y + 12, f"and {len(peaks) - number:,} more ranks"))
        y += pitch
    said = "peak of each rank; a mark is its device's memory" if any(limits) else "peak of each"
    drawing = theme.document(parts, 470, y + 4)
    return Panel("All ranks", drawing, said, note="choose one to look at")


def _limit(rank: RankMemory, machine: Machine | None) -> tuple[str, ...]:
    if machine is None:
        return ()
    limit = machine.device(rank.rank).memory_bytes
    if rank.peak_bytes > limit:
        over = size(rank.peak_bytes - limit)
        return (
            f"That is {over} over its device's {size(limit)}: split more layers, recompute "
            "activations, or take smaller micro-batches.",
        )
    return (f"Its device has {size(limit)}: {100 * rank.peak_bytes / limit:.3g} % are used.",)


def _table(held: Held, by: str) -> Table:
    rows = tuple(
        (layer or "the step", _words(kind), f"{count:,}", size(count))
        for tiles in grouped(held, by).values()
        for (kind, layer), count in tiles.items()
    )
    return Table("Tensors at the peak", ("layer", "category", "bytes", ""), rows)


def _words(category: str) -> str:
    return category.replace("_", " ")


def _fit(text: str, room: int) -> str:
    return text if len(text) <= room else f"{text[: max(room - 1, 1)]}…"


def _fullest(prediction: Prediction) -> int:
    memory = prediction.memory
    most = memory.peak_bytes
    return next(each.rank for each in memory.ranks if each.peak_bytes == most)


def require(prediction: Any, what: str) -> Prediction:
    """The prediction, checked.

    Raises:
        TypeError: it is no prediction.
    """
    if not isinstance(prediction, Prediction):
        raise TypeError(
            f"{what} takes a Prediction, got {type(prediction).__name__}; "
            "wb.predict(plan, machine, experiment) makes one"
        )
    return prediction
