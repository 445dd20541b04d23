"""A dashboard in Chromium over minutes: its frames, its memory, and the kernel's processor time."""

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import psutil

from workbench.bench.report import Cell, Figure
from workbench.bench.widgets.acting_run import ActingRun
from workbench.bench.widgets.front_end import FrontEnd
from workbench.widgets.dashboard import Dashboard

RANKS, RATE = 64, 10.0
MINUTES = 10.0
LOOK_EVERY_S = 0.02  # for what the page sends
STARTED_WITHIN_S = 60.0
WINDOWS = 20
WARM = 0.25  # of the time, until when histories fill
COUNT = """() => {
  window.counted = 0;
  const count = () => { window.counted += 1; requestAnimationFrame(count); };
  requestAnimationFrame(count);
}"""
DRAWN = "Number(document.querySelector('.wb-dashboard')?.dataset.frames ?? 0)"


@dataclass(frozen=True)
class DashboardCost:
    """The measurements.

    Attributes:
        row: the row of the table.
        figures: the figures, by name.
    """

    row: Mapping[str, Cell]
    figures: Mapping[str, Figure]


def measured(page: Any, minutes: float) -> DashboardCost:
    """Shows 64 ranks that report ten steps a second.

    Args:
        page: the page, which shows nothing else.
        minutes: the length of the measurement, in minutes.
    """
    run = ActingRun(RANKS, RATE)
    dashboard = Dashboard(run)
    threads = run.thread, dashboard._thread
    session = page.context.new_cdp_session(page)
    try:
        shown = FrontEnd(page, dashboard)
        shown.until(f"{DRAWN} > 1", patience_s=STARTED_WITHIN_S)
        page.evaluate(COUNT)
        process, length_s = psutil.Process(), 60 * minutes / WINDOWS
        rates, busy, heap, memory = [], [], [], []
        drawn_before, begun = int(page.evaluate(DRAWN)), time.monotonic()
        for _ in range(WINDOWS):
            before, spent, start = page.evaluate("counted"), _cpu_s(threads), time.monotonic()
            while time.monotonic() - start < length_s:
                shown.pass_on(LOOK_EVERY_S)
            took = time.monotonic() - start
            rates.append((page.evaluate("counted") - before) / took)
            busy.append((_cpu_s(threads) - spent) / took)
            heap.append(_heap(session))
            memory.append(float(process.memory_info().rss))
        drawn = (int(page.evaluate(DRAWN)) - drawn_before) / (time.monotonic() - begun)
    finally:
        dashboard.close()
        run.stop()
        session.detach()
    warm = int(WARM * WINDOWS)
    row: dict[str, Cell] = {
        "ranks": RANKS,
        "minutes": minutes,
        "frames/s": Figure.of(rates).median,
        "fewest": min(rates),
        "drawn/s": drawn,
        "heap MiB": heap[-1] / 2**20,
        "kernel busy %": 100 * Figure.of(busy).median,
    }
    figures = {
        "dashboard_frames_per_s": Figure.of(rates),
        "dashboard_memory_growth": Figure.of([heap[-1] / heap[warm]]),
        "dashboard_kernel_memory_growth": Figure.of([memory[-1] / memory[warm]]),
        "dashboard_kernel_busy": Figure.of(busy),
    }
    return DashboardCost(row, figures)


def _cpu_s(threads: Sequence[threading.Thread]) -> float:
    """Processor seconds of the threads that a kernel would have: one reads rows, one sends them."""
    clocks = [time.pthread_getcpuclockid(each.ident) for each in threads if each.ident is not None]
    return sum(map(time.clock_gettime, clocks))


def _heap(session: Any) -> float:
    """Bytes of the page's scripts and elements, after a garbage collection."""
    session.send("HeapProfiler.collectGarbage")
    usage = session.send("Runtime.getHeapUsage")
    return float(usage["usedSize"]) + float(usage.get("embedderHeapUsedSize", 0))
