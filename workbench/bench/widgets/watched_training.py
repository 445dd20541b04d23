"""A run on engines with a dashboard: the dashboard's lag, and its cost to the run."""

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

from workbench.bench.report import Cell, Figure
from workbench.bench.widgets.front_end import FrontEnd
from workbench.client.cluster import Cluster
from workbench.client.run.run import Run
from workbench.model import trace
from workbench.plan.experiment.experiment import SGD, Experiment
from workbench.plan.plans.plan import Plan
from workbench.widgets.dashboard import Dashboard

RANKS = 2
STEPS = 10**6
STARTED_WITHIN_S = 120.0
LOOK_EVERY_S = 0.02  # for what the page sends
# When the frame with a new number of steps was handed to the screen.
WATCH = """() => {
  window.seen = [];
  const root = document.querySelector('.wb-dashboard');
  new MutationObserver(() => {
    const done = Number(root.dataset.done);
    requestAnimationFrame(() => setTimeout(() => seen.push([done, Date.now() / 1000])));
  }).observe(root, {attributes: true, attributeFilter: ['data-done']});
}"""


def measured(
    page: Any, rounds: int, *, quick: bool
) -> tuple[Mapping[str, Cell], Mapping[str, Figure]]:
    """Trains a small net on two engines, with and without a dashboard in turns.

    Args:
        page: the page, which shows nothing else.
        rounds: how often each takes its turn.
        quick: whether rounds are short.
    """
    seconds = 2.0 if quick else 10.0
    lags: list[float] = []
    ratios: list[float] = []
    with _training() as run:
        for index in range(rounds):
            # Watched first, and then last: whatever drifts, drifts for both.
            sides = [True, False] if index % 2 else [False, True]
            found = {side: _window(run, page, seconds, lags, watched=side) for side in sides}
            ratios.append(found[True] / found[False])
    lag, slowed = Figure.of([1e3 * each for each in lags]), Figure.of(ratios)
    row: dict[str, Cell] = {
        "engines": RANKS,
        "steps seen": len(lags),
        "lag ms": lag.median,
        "lag ms, 95 %": 1e3 * statistics.quantiles(lags, n=20)[-1],
        "step, watched / alone": slowed.median,
    }
    return row, {"dashboard_lag_ms": lag, "dashboard_slowdown": slowed}


def _window(run: Run, page: Any, seconds: float, lags: list[float], *, watched: bool) -> float:
    """The median seconds of a step, over so many seconds."""
    if not watched:
        first = run.rows.num_arrived
        time.sleep(seconds)
        return _step_s(run, first)
    dashboard = Dashboard(run)
    try:
        shown = FrontEnd(page, dashboard)
        shown.until("document.querySelector('.wb-dashboard').dataset.done > 0")
        page.evaluate(WATCH)
        first, end = run.rows.num_arrived, time.monotonic() + seconds
        while time.monotonic() < end:
            shown.pass_on(LOOK_EVERY_S)
        lags += _lags(run, first, page.evaluate("seen"))
        return _step_s(run, first)
    finally:
        dashboard.close()


def _step_s(run: Run, first: int) -> float:
    rows, _ = run.rows.since(first)
    return statistics.median(r["compute_s"] + r["communication_s"] + r["wait_s"] for r in rows)


def _lags(run: Run, first: int, seen: list[tuple[float, float]]) -> list[float]:
    """Seconds from the end of each step, on its last rank, to the first frame that counts it."""
    ended: dict[int, float] = {}
    for row in run.rows.since(first)[0]:
        step = int(row["step"])
        ended[step] = max(row["time"], ended.get(step, 0.0))
    found, before = [], int(seen[0][0]) if seen else 0
    for done, at in seen[1:]:
        found += [at - ended[step] for step in range(before, int(done)) if step in ended]
        before = int(done)
    return found


@contextmanager
def _training() -> Iterator[Run]:
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 10))
    graph = trace(net, input_shape=(1, 8, 8))
    experiment = Experiment(
        plan=Plan.hybrid(graph, RANKS),
        data="digits",
        batch_size=256,
        optimizer=SGD(lr=0.01, momentum=0.9),
        steps=STEPS,
    )
    with tempfile.TemporaryDirectory() as folder, Cluster(RANKS, directory=folder) as cluster:
        run = cluster.train(experiment, module=net)
        _until(lambda: run.state == "running" and len(run.rows) > 20 * RANKS)
        yield run
        run.stop()
        run.join(STARTED_WITHIN_S)


def _until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + STARTED_WITHIN_S
    while not is_so():
        if time.monotonic() > deadline:
            raise TimeoutError("the run did not start")
        time.sleep(0.05)
