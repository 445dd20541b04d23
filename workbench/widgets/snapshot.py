"""A run as a still picture with a table: what is left of a dashboard where no kernel runs."""

import math
from html import escape

from workbench.widgets.charts import Axis, Bar, Curve, bar_panel, document, image, line_panel
from workbench.widgets.series import Series
from workbench.widgets.status import Status
from workbench.widgets.units import digits, milliseconds, size

# Okabe and Ito's colors, which people with any color vision tell apart.
BLUE, SKY, VERMILION, GREEN = "#0072B2", "#56B4E9", "#D55E00", "#009E73"
ORANGE, GRAY, BLACK = "#E69F00", "#9aa0a6", "#212121"


def picture(series: Series) -> str:
    """Four panels as one SVG document: loss and accuracy, samples/s, memory, a step's time."""
    at, ranks = series.columns, series.ranks
    percent = "–" if math.isnan(series.accuracy) else f"{100 * series.accuracy:.1f} %"
    loss = Curve("loss", at["step"], at["loss"], BLUE, digits(_last(at["loss"])))
    accuracy = Curve(
        "test accuracy", at["step"], at["accuracy"], VERMILION, percent, axis="right", dots=True
    )
    now = digits(_last(at["samples_per_s"]))
    speed = Curve("samples/s", at["step"], at["samples_per_s"], GREEN, now, fill=True)
    memory = [
        Bar(
            f"rank {rank}",
            (figures.now_bytes,),
            f"{size(figures.now_bytes)} / {size(figures.peak_bytes)}",
            figures.peak_bytes,
        )
        for rank, figures in enumerate(ranks)
    ]
    times = [(f.compute_s, f.communication_s, f.wait_s) for f in ranks]
    clock = [
        Bar(f"rank {rank}", parts, milliseconds(sum(parts))) for rank, parts in enumerate(times)
    ]
    names = ((GREEN, "compute"), (ORANGE, "communication"), (GRAY, "wait"))
    shares = tuple(
        (color, name, milliseconds(_average([parts[i] for parts in times])))
        for i, (color, name) in enumerate(names)
    )
    kind = "GPU memory" if any(figures.on_gpu for figures in ranks) else "Tensor memory"
    held = size(max(_known([f.now_bytes for f in ranks]), default=math.nan))
    most = size(max(_known([f.peak_bytes for f in ranks]), default=math.nan))
    return document(
        (
            line_panel(
                "Loss and accuracy",
                (loss, accuracy),
                Axis("loss"),
                Axis("test accuracy (%)", top=1.0, scale=100.0),
            ),
            line_panel("Throughput", (speed,), Axis("samples/s")),
            bar_panel(f"{kind} per rank", memory, ((SKY, "now", held), (BLACK, "peak", most))),
            bar_panel("Time of a step per rank", clock, shares),
        )
    )


def html(series: Series, status: Status) -> str:
    """The picture and a table of the ranks, in HTML that untrusted notebooks show too."""
    headers = ("rank", "memory now", "peak", "compute", "communication", "wait")
    rows = [
        (
            str(rank),
            size(figures.now_bytes),
            size(figures.peak_bytes),
            *(
                milliseconds(s)
                for s in (figures.compute_s, figures.communication_s, figures.wait_s)
            ),
        )
        for rank, figures in enumerate(series.ranks)
    ]
    head = "".join(f'<th scope="col">{name}</th>' for name in headers)
    body = "".join("<tr>" + "".join(f"<td>{text}</td>" for text in row) + "</tr>" for row in rows)
    error = f"<pre>{escape(status.error)}</pre><p>{status.advice}</p>" if status.error else ""
    notes = "".join(f"<p>{escape(note)}</p>" for note in status.notes)
    return (
        f"<p><b>Run</b>: {escape(str(status))}</p>{error}{notes}"
        f"{image(picture(series), f'Charts of the run: {status}')}"
        f"<details><summary>Memory, and a step's time, per rank</summary>"
        f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></details>"
    )


def _known(values: list[float]) -> list[float]:
    return [value for value in values if math.isfinite(value)]


def _last(values: list[float]) -> float:
    return (_known(values) or [math.nan])[-1]


def _average(values: list[float]) -> float:
    known = _known(values)
    return sum(known) / len(known) if known else math.nan
