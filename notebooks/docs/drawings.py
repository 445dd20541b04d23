"""Drawings for the site, of what the library itself computes."""

import math

from way import extension_points as extension_points
from way import way as way

import workbench as wb
from workbench.predict.closed_form import Coding, Compute, Network

COLORS = ("#4477aa", "#ee6677", "#228833", "#ccbb44")  # told apart by the color-blind, too
WIDTH, HEIGHT = 132, 84
_MOST_POINTS = 60

TENSORS = {  # scheme: how input, weight and output lie
    "replicate": ("rows", "whole", "rows"),
    "shard_out": ("whole", "first", "features"),
    "shard_in": ("features", "second", "summands"),
    "duplicate": ("whole", "whole", "whole"),
}


def placements() -> str:
    """For each scheme: what rank 0, 1 and 2 of a group hold, with shares of 3 : 2 : 1."""
    parts = [_start(640, 40 + len(TENSORS) * (HEIGHT + 34))]
    for column, title in enumerate(("input", "weight", "output")):
        parts.append(_text(190 + column * 160, 20, title, "middle", "600"))
    for row, (scheme, kinds) in enumerate(TENSORS.items()):
        top = 36 + row * (HEIGHT + 34)
        parts.append(_text(8, top + HEIGHT / 2, scheme, "start", "600"))
        for column, kind in enumerate(kinds):
            parts.append(_tensor(kind, 124 + column * 160, top))
    return _end(parts)


def _tensor(kind: str, left: float, top: float) -> str:
    """One tensor of a group of three: rows go down, features to the right."""
    found, done = "", 0.0
    if kind in ("whole", "summands"):
        mark = "+" if kind == "summands" else ""
        for rank in (2, 1, 0):  # three copies, or three summands, behind each other
            shift = 7 * rank
            found += _box(left + shift, top + shift, WIDTH - 16, HEIGHT - 16, rank, 1)
        return found + _text(left + 50, top + 38, mark, "middle", "600", 22)
    for rank, part in enumerate((3 / 6, 2 / 6, 1 / 6)):
        if kind in ("rows", "first"):
            found += _box(left, top + done * HEIGHT, WIDTH, part * HEIGHT, rank, 1)
        else:
            found += _box(left + done * WIDTH, top, part * WIDTH, HEIGHT, rank, 1)
        done += part
    return found


def plan() -> str:
    """A hybrid plan, as the library prints it."""
    graph = wb.trace("vgg11", input_shape=(3, 32, 32), num_classes=10)
    return f"```text\n{wb.Plan.hybrid(graph, world_size=4, group_size=4)!r}\n```"


def timeline() -> str:
    """The predicted step of a hybrid VGG-11 on four nodes with 10 GbE."""
    graph = wb.trace("vgg11", input_shape=(3, 32, 32), num_classes=10)
    plan = wb.Plan.hybrid(graph, world_size=4, group_size=4)
    experiment = wb.Experiment(
        plan=plan,
        data=wb.Synthetic(samples=1024, classes=10),
        batch_size=128,
        optimizer=wb.SGD(lr=0.01, momentum=0.9),
        steps=1,
    )
    prediction = wb.predict(plan, wb.Machine.preset("cpu-10gbe"), experiment)
    return prediction.timeline.svg()


def strategies() -> str:
    """Iteration time against the bandwidth, of every strategy, in closed form."""
    model = wb.TimingModel(
        workers=4,
        gradient_bytes=244e6,  # AlexNet's 61.1 M parameters
        compute=Compute(update_s=0.1, forward_s=0.3, backward_s=0.6),
        network=Network(bandwidth=1.25e8, latency_s=1e-4, reduction_s_per_byte=2e-10),
        coding={"int8": Coding(2e-10, 2e-10)},
    )
    systems = {
        "parameter server": wb.ParameterServer(),
        "synchronous, ring": wb.Synchronous(algorithm="ring", bucket_bytes=2**62),
        "Pipe-SGD, K = 2": wb.Pipelined(width=2),
        "Pipe-SGD, int8": wb.Pipelined(width=2, codec="int8"),
    }
    rates = [1e7 * 10 ** (2.5 * i / _MOST_POINTS) for i in range(_MOST_POINTS + 1)]
    lines = {
        name: [model.at(bandwidth=rate).step_s(sync) for rate in rates]
        for name, sync in systems.items()
    }
    return _curves(rates, lines)


def _curves(rates: list[float], lines: dict[str, list[float]]) -> str:
    width, height, left, top = 640, 320, 60, 16
    low = min(min(line) for line in lines.values())
    high = max(max(line) for line in lines.values())

    def x(rate: float) -> float:
        first, last = math.log(rates[0]), math.log(rates[-1])
        return left + (math.log(rate) - first) / (last - first) * (width - left - 20)

    def y(seconds: float) -> float:
        ratio = (math.log(seconds) - math.log(low)) / (math.log(high) - math.log(low))
        return top + (1 - ratio) * (height - top - 50)

    parts = [_start(width, height)]
    for rate, label in ((1.25e7, "100 Mbit/s"), (1.25e8, "1 Gbit/s"), (1.25e9, "10 Gbit/s")):
        parts.append(_text(x(rate), height - 28, label, "middle"))
        parts.append(_line(x(rate), top, x(rate), height - 44))
    for seconds in (1, 3, 10, 30, 100):
        if low <= seconds <= high:
            parts.append(_text(left - 6, y(seconds) + 4, f"{seconds} s", "end"))
            parts.append(_line(left, y(seconds), width - 20, y(seconds)))
    for index, (name, line) in enumerate(lines.items()):
        points = " ".join(f"{x(r):.1f},{y(s):.1f}" for r, s in zip(rates, line, strict=True))
        color = COLORS[index]
        parts.append(f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="2"/>')
        parts.append(_box(left + 270, top + 8 + index * 20, 12, 12, index, 1))
        parts.append(_text(left + 290, top + 18 + index * 20, name, "start"))
    return _end(parts)


def _start(width: float, height: float) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
        f'style="max-width:{width}px;width:100%;font:13px sans-serif" fill="currentColor">'
    )


def _end(parts: list[str]) -> str:
    return "".join([*parts, "</svg>"])


def _box(left: float, top: float, width: float, height: float, rank: int, opacity: float) -> str:
    return (
        f'<rect x="{left:.1f}" y="{top:.1f}" width="{width:.1f}" height="{height:.1f}" '
        f'fill="{COLORS[rank]}" fill-opacity="{opacity}" stroke="white"/>'
    )


def _line(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<path d="M{x1:.1f} {y1:.1f}L{x2:.1f} {y2:.1f}" stroke="#8888" stroke-width="0.5"/>'


def _text(x: float, y: float, text: str, anchor: str, weight: str = "400", size: float = 13) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-weight="{weight}" '
        f'font-size="{size}">{text}</text>'
    )
