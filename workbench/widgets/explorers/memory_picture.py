"""What the memory map draws: a rank's tensors at its peak, by category and layer, to scale."""

from collections.abc import Mapping, Sequence
from html import escape
from itertools import groupby

from workbench.plan.machine import Machine
from workbench.predict.memory.memory import RankMemory
from workbench.predict.memory.timeline import CATEGORIES, Category
from workbench.widgets.explorers.colours import paint
from workbench.widgets.explorers.picture import Entry, Panel, Picture, Table
from workbench.widgets.explorers.plot import document, words
from workbench.widgets.explorers.reading import shortened
from workbench.widgets.explorers.treemap import Box, squarified
from workbench.widgets.units import size

WIDTH, HEIGHT = 960, 420
_HEADING = 17
_LETTER = 6.4  # width of one in a label
MOST_TILES = 400
MOST_RANKS = 24

# Two of one colour are told apart by their labels; they are never large together.
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


def of(
    rank: RankMemory, peaks: Sequence[int], by: str, inside: str, machine: Machine | None, name: str
) -> Picture:
    """The picture of one rank.

    Args:
        rank: as predicted.
        peaks: of all ranks, in bytes.
        by: what tiles are put together by first: "category" or "layer".
        inside: one of these alone; "": all.
        machine: whose device's memory is the limit, or None.
        name: of the model.
    """
    held = {key: count for key, count in rank.held.items() if count > 0}
    groups = grouped(held, by)
    if inside:
        groups = {inside: groups[inside]}
    total = sum(sum(tiles.values()) for tiles in groups.values())
    of_all = f", of it {inside} {size(total)}" if inside else ""
    categories = {kind: count for kind, count in rank.categories.items() if count}
    legend = tuple(
        Entry(_words(kind), LOOKS[kind], size(categories[kind]))
        for kind in CATEGORIES
        if kind in categories
    )
    most = max(CATEGORIES, key=lambda kind: categories.get(kind, 0))
    said = (
        f"Rank {rank.rank} holds most in the {rank.moment}: {size(rank.peak_bytes)}{of_all}. "
        f"Most of it is {_words(most)}, {size(categories.get(most, 0))}.",
        *_limit(rank, machine),
    )
    svg = tiles_svg(groups, by)
    alt = f"Tensors of rank {rank.rank} at its peak; areas are bytes."
    panels = (
        Panel(f"Rank {rank.rank} at its peak", svg, alt, legend, size(total), wide=True),
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


def tiles_svg(groups: Mapping[str, Mapping[tuple[Category, str], int]], by: str) -> str:
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
        said = escape(f"{group}: {size(total)}, {len(tiles)} tensors; choose to look into it")
        parts.append(
            f'<g role="button" data-cell="{escape(name)}" data-pick="{escape(name)}" '
            f'aria-label="{said}"><rect {_place(box)} style="fill:{paint("raised")};'
            f'stroke:{paint("ground")}"><title>{said}</title></rect>'
        )
        if headed:
            room = int((box.width - 10) / _LETTER)
            parts.append(
                words(box.x + 5, box.y + 13, _fit(f"{group} {size(total)}", room), colour="ink")
            )
        parts += [
            _tile(key, count, tile, by)
            for (key, count), tile in zip(shown.items(), boxes, strict=False)
        ]
        if rest and boxes:
            parts.append(_rest(len(tiles) - len(shown), rest, boxes[-1]))
        parts.append("</g>")
    return document("".join(parts), WIDTH, HEIGHT)


def _tile(key: tuple[Category, str], count: int, box: Box, by: str) -> str:
    kind, layer = key
    name = (layer or "the step") if by == "category" else _words(kind)
    said = escape(f"{layer or 'the step'}, {_words(kind)}: {size(count)}")
    drawn = (
        f'<rect {_place(box)} style="fill:{paint(LOOKS[kind])};stroke:{paint("ground")};'
        f'stroke-width:1"><title>{said}</title></rect>'
    )
    room = int((box.width - 6) / _LETTER)
    if box.height < 15 or room < 4:
        return drawn
    label = f'<text x="{box.x + 4:.1f}" y="{box.y + 12:.1f}" style="fill:#fff" {_HALO}>'
    lines = f"{drawn}{label}{escape(_fit(name, room))}</text>"
    if box.height < 30:
        return lines
    below = f'<text x="{box.x + 4:.1f}" y="{box.y + 26:.1f}" style="fill:#fff" {_HALO}>'
    return f"{lines}{below}{escape(_fit(size(count), room))}</text>"


# White letters with a dark rim are read on every colour of either theme.
_HALO = 'stroke="#000" stroke-opacity="0.55" stroke-width="2.4" paint-order="stroke"'


def _rest(number: int, count: int, box: Box) -> str:
    said = escape(f"{number} smaller ones: {size(count)}")
    return (
        f'<rect {_place(box)} style="fill:{paint("gray")};opacity:0.5"><title>{said}</title></rect>'
    )


def _place(box: Box) -> str:
    return f'x="{box.x:.2f}" y="{box.y:.2f}" width="{box.width:.2f}" height="{box.height:.2f}"'


def _ranks_panel(peaks: Sequence[int], shown: int, machine: Machine | None) -> Panel:
    """The peaks of ranks as bars, of many the first ones."""
    number = min(len(peaks), MOST_RANKS)
    limits = [machine.device(rank).memory_bytes if machine else 0 for rank in range(number)]
    full = max([*peaks[:number], *limits, 1])
    pitch, left, wide = 20, 54, 470 - 54 - 165
    parts = []
    for rank in range(number):
        y, over = 4 + rank * pitch, bool(limits[rank]) and peaks[rank] > limits[rank]
        colour = "vermilion" if over else "blue" if rank == shown else "sky"
        text = size(peaks[rank]) + (f" of {size(limits[rank])}" if limits[rank] else "")
        said = escape(f"rank {rank}: {text}{', over budget' if over else ''}")
        mark = (
            f'<path d="M{left + wide * limits[rank] / full:.1f} {y - 1}v17" '
            f'style="stroke:{paint("ink")};stroke-width:2"/>'
            if limits[rank]
            else ""
        )
        parts.append(
            f'<g role="button" data-cell="rank {rank}" data-pick="rank {rank}" aria-label="{said}">'
            f'<rect x="{left}" y="{y}" width="{wide}" height="15" style="fill:{paint("raised")}"/>'
            f'<rect x="{left}" y="{y}" width="{wide * peaks[rank] / full:.1f}" height="15" '
            f'style="fill:{paint(colour)}"><title>{said}</title></rect>{mark}'
            + words(left - 8, y + 12, f"rank {rank}", "end", "ink" if rank == shown else "faint")
            + words(left + wide + 8, y + 12, f"{text}{' over!' if over else ''}", colour="ink")
            + "</g>"
        )
    y = 4 + number * pitch
    if len(peaks) > number:
        parts.append(words(left, y + 12, f"and {len(peaks) - number:,} more ranks"))
        y += pitch
    said = "peak of each rank; a mark is its device's memory" if any(limits) else "peak of each"
    svg = document("".join(parts), 470, y + 4)
    return Panel("All ranks", svg, said, note="choose one to look at")


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
