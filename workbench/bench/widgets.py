"""Widgets in Chromium: the plan editor's start and edits, a dashboard's lag and frames.

A bare page replaces the front end: browser, scripts and messages are the real ones, and kernel and
page are connected by Chromium's debugging protocol instead of Jupyter's websocket.

    editor      the first paint, and edits of large models
    watched     a run on engines with a dashboard: the dashboard's lag, and its cost to the run
    dashboard   64 acted ranks over minutes: frames, memory, and the kernel's processor time
"""

import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import psutil
from torch import nn

from workbench.bench.harness.browser import FrontEnd, browser, chromium
from workbench.bench.harness.progress import Part, Progress
from workbench.bench.harness.report import MIB, Cell, Figure, Report, Row
from workbench.bench.reporters import acting
from workbench.client.cluster import Cluster
from workbench.client.run.job import TICK_S
from workbench.client.run.rows import Rows
from workbench.client.run.run import Run
from workbench.model import trace
from workbench.plan.experiment.experiment import SGD, Experiment
from workbench.plan.graph.graph import Graph
from workbench.plan.machine.machine import Machine
from workbench.plan.plans.plan import Plan
from workbench.predict.measured import Timeline
from workbench.store.telemetry import AttemptReader
from workbench.widgets.dashboard import Dashboard
from workbench.widgets.editor import PlanEditor

RANKS = 8  # of the editor's plans
MACHINE = "h100-nvlink"
SETTLED = "document.querySelector('.wb-editor').dataset.pending === 'false'"
# The editor draws the rows in view only: the last one, which is edited, is scrolled to.
LAST_ROW = """(label) => {
  const scroll = document.querySelector('.wb-scroll');
  scroll.scrollTop = scroll.scrollHeight;
  return document.querySelector(`[aria-label="${label}"]`) !== null;
}"""
# From the event until the frame that shows the new prediction has been handed to the screen.
EDIT = """([label, value]) => {
  const root = document.querySelector('.wb-editor');
  const select = document.querySelector(`[aria-label="${label}"]`);
  window.took = null;
  const began = performance.now();
  let asked = false;
  const watch = new MutationObserver(() => {
    asked ||= root.dataset.pending === 'true';
    if (!asked || root.dataset.pending !== 'false') return;
    watch.disconnect();
    requestAnimationFrame(() => setTimeout(() => { window.took = performance.now() - began; }));
  });
  watch.observe(root, {attributes: true, attributeFilter: ['data-pending']});
  select.value = value;
  select.dispatchEvent(new Event('change'));
}"""


@dataclass(frozen=True)
class Case:
    """A model to edit, with the name of the layer that is edited, the last one."""

    name: str
    graph: Graph
    layer: str


@dataclass(frozen=True)
class Seen:
    """Milliseconds of each first paint and each edit, until it is on the screen; bytes of edits."""

    paint: list[float]
    redraw: list[float]
    patch: list[float]


def run(progress: Progress, *, quick: bool) -> Iterator[Report]:
    """Measures every model; `quick` takes a small one.

    Raises:
        RuntimeError: Chromium is not installed.
    """
    if chromium() is None:
        raise RuntimeError("this bench needs Chromium (Debian: apt-get install chromium)")
    cases, rounds, minutes = (_quick(), 2, 0.1) if quick else (_every(), 6, MINUTES)
    progress.begin(
        Part("editor", len(cases), 20),
        Part("watched", 1, 10 * rounds if quick else 25 * rounds),
        Part("dashboard", 1, 60 * minutes + 20),
    )
    minutes *= progress.fitting(WINDOWS, 1) / WINDOWS
    rows: list[Row] = []
    figures: dict[str, Figure] = {}
    with browser(viewport={"width": 1400, "height": 1000}) as context:
        page = context.new_page()
        for case in progress.each("editor", cases):
            seen = _measure(page, case, openings=2 if quick else 5, edits=4 if quick else 20)
            rows.append(_row(case, seen))
            if not figures:  # of the first model, which the targets are stated for
                figures["editor_redraw_ms"] = Figure.of(seen.redraw)
                figures["editor_first_paint_ms"] = Figure.of(seen.paint)
                figures["editor_patch_bytes"] = Figure.of(seen.patch)
            yield _report(rows, figures, minutes)
        for _ in progress.each("watched"):
            row, more = _watched(page, progress.fitting(rounds), 2.0 if quick else 10.0)
            rows.append(row)
            figures |= more
            yield _report(rows, figures, minutes)
        for _ in progress.each("dashboard"):
            row, more = _dashboard(page, minutes)
            rows.append(row)
            figures |= more
            yield _report(rows, figures, minutes)


def _report(rows: list[Row], figures: Mapping[str, Figure], minutes: float) -> Report:
    notes = (
        f"{RANKS} ranks of {MACHINE}. redraw: an edit of the last layer's scheme until the new "
        "prediction is on the screen. Targets for ResNet-152: 100 ms; its first paint: 500 ms.",
        f"dashboard_lag_ms: from the end of each step of {TRAINING} engines, on the "
        "last of them, to the frame that counts it (target: 250). dashboard_slowdown: a step with "
        "a dashboard, browser included, over one without, in turns (target: 1.01).",
        f"{ACTED} acted ranks with {RATE:g} steps a second for {minutes:g} "
        "minutes: frames per second (target: 30), memory of the page's scripts at the end over "
        "that after a quarter (target: 1.1), share of a core that the kernel spends on reading "
        "their rows and sending them (target: 0.1).",
    )
    return Report("widgets", tuple(rows), dict(figures), notes)


def _quick() -> list[Case]:
    return [Case("vgg11", trace("vgg11", input_shape=(3, 32, 32), num_classes=10), "classifier.6")]


def _every() -> list[Case]:
    image = (3, 224, 224)
    plain = nn.Sequential(*[m for _ in range(150) for m in (nn.Linear(64, 64), nn.ReLU())])
    return [
        Case("resnet152", trace("resnet152", input_shape=image, num_classes=1000), "fc"),
        Case("vit_l_16", trace("vit_l_16", input_shape=image, num_classes=1000), "heads.head"),
        Case("300 rows", trace(plain, input_shape=(64,)), "298"),
    ]


def _measure(page: Any, case: Case, *, openings: int, edits: int) -> Seen:
    editor = PlanEditor(case.graph, Machine.preset(MACHINE), world_size=RANKS)
    try:
        editor.settle()
        paint, redraw, patch = [], [], []
        for _ in range(openings):
            shown = FrontEnd(page, editor)
            shown.until(SETTLED)
            paint.append(float(page.evaluate("window.firstPaint")))
        label = f"scheme, {case.layer}"
        shown.until(LAST_ROW, label)
        for index in range(edits + 1):
            before = shown.sent_bytes
            scheme = ("shard_out", "duplicate")[index % 2]
            page.evaluate(EDIT, [label, scheme])
            shown.until("window.took !== null")
            if index:  # the first one begins to keep what is known of layers
                redraw.append(float(page.evaluate("window.took")))
                patch.append(float(shown.sent_bytes - before))
        return Seen(paint, redraw, patch)
    finally:
        editor.close()


def _row(case: Case, seen: Seen) -> dict[str, Cell]:
    redraw, paint = Figure.of(seen.redraw), Figure.of(seen.paint)
    return {
        "model": case.name,
        "layers": len(case.graph.layers),
        "first paint ms": paint.median,
        "redraw ms": redraw.median,
        "worst": redraw.max,
        "patch bytes": Figure.of(seen.patch).median,
    }


TRAINING = 2
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


def _watched(page: Any, rounds: int, seconds: float) -> tuple[Row, Mapping[str, Figure]]:
    """Trains a small net on two engines, with and without a dashboard in turns of so long."""
    lags: list[float] = []
    ratios: list[float] = []
    with _training() as run:
        for index in range(rounds):
            # Watched first, and then last: whatever drifts, drifts for both.
            sides = [True, False] if index % 2 else [False, True]
            steps = {side: _window(run, page, seconds, lags, watched=side) for side in sides}
            ratios.append(steps[True] / steps[False])
    lag, slowed = Figure.of([1e3 * each for each in lags]), Figure.of(ratios)
    row: dict[str, Cell] = {
        "engines": TRAINING,
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
    lags, before = [], int(seen[0][0]) if seen else 0
    for done, at in seen[1:]:
        lags += [at - ended[step] for step in range(before, int(done)) if step in ended]
        before = int(done)
    return lags


@contextmanager
def _training() -> Iterator[Run]:
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 10))
    graph = trace(net, input_shape=(1, 8, 8))
    experiment = Experiment(
        plan=Plan.hybrid(graph, TRAINING),
        data="digits",
        batch_size=256,
        optimizer=SGD(lr=0.01, momentum=0.9),
        steps=STEPS,
    )
    with tempfile.TemporaryDirectory() as folder, Cluster(TRAINING, directory=folder) as cluster:
        run = cluster.train(experiment, module=net)
        _until(lambda: run.state == "running" and len(run.rows) > 20 * TRAINING)
        yield run
        run.stop()
        run.join(STARTED_WITHIN_S)


def _until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + STARTED_WITHIN_S
    while not is_so():
        if time.monotonic() > deadline:
            raise TimeoutError("the run did not start")
        time.sleep(0.05)


ACTED, RATE = 64, 10.0
MINUTES = 10.0
WINDOWS = 20
KEPT_STEPS = 100  # of an acting run
WARM = 0.25  # of the time, until when histories fill
COUNT = """() => {
  window.counted = 0;
  const count = () => { window.counted += 1; requestAnimationFrame(count); };
  requestAnimationFrame(count);
}"""
DRAWN = "Number(document.querySelector('.wb-dashboard')?.dataset.frames ?? 0)"


class ActingRun:
    """A run as a dashboard sees it, whose rows another process writes.

    Following it is the work of a real `Run`: reading new rows from the files of every rank, on the
    thread `thread`.
    """

    id = 1
    reason, error, cluster, engines = "", None, None, ()

    def __init__(self, folder: Path, world_size: int) -> None:
        plan, optimizer = SimpleNamespace(world_size=world_size), SimpleNamespace(lr=0.1)
        self.experiment = SimpleNamespace(
            steps=10**6, plan=plan, optimizer=optimizer, trace_every=0
        )
        self.rows = Rows(most=KEPT_STEPS * world_size)
        self.notes: list[str] = []
        self.evaluation: Mapping[str, float] = {}
        self.state = "running"
        self._reader = AttemptReader(folder, world_size)
        self._callbacks: list[Callable[[Any], None]] = []
        self._stopping = threading.Event()
        self.thread = threading.Thread(target=self._follow, name="acting run", daemon=True)
        self.thread.start()

    @property
    def is_stopping(self) -> bool:
        return self._stopping.is_set()

    def stop(self) -> None:
        self._stopping.set()
        self.thread.join()
        self.state = "stopped"
        self._tell()

    def events(self, after: int = 0) -> Sequence[Any]:
        return ()

    def timeline(self, step: int | None = None) -> Timeline:
        raise ValueError("an acting run traces nothing")

    def subscribe(self, callback: Callable[[Any], None]) -> Callable[[], None]:
        self._callbacks.append(callback)
        return lambda: self._callbacks.remove(callback)

    def _tell(self) -> None:
        for callback in list(self._callbacks):
            callback([])

    def _follow(self) -> None:
        while not self._stopping.wait(TICK_S):
            if rows := self._reader.read():
                rows.sort(key=lambda row: (row["step"], row["rank"]))
                self.rows.extend(rows)
                self._tell()


def _dashboard(page: Any, minutes: float) -> tuple[Row, Mapping[str, Figure]]:
    """Shows 64 ranks that report ten steps a second, for so many minutes."""
    with acting(ACTED, RATE) as folder:
        run = ActingRun(folder, ACTED)
        dashboard = Dashboard(cast(Any, run))
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
        "ranks": ACTED,
        "minutes": minutes,
        "frames/s": Figure.of(rates).median,
        "fewest": min(rates),
        "drawn/s": drawn,
        "heap MiB": heap[-1] / MIB,
        "kernel busy %": 100 * Figure.of(busy).median,
    }
    figures = {
        "dashboard_frames_per_s": Figure.of(rates),
        "dashboard_memory_growth": Figure.of([heap[-1] / heap[warm]]),
        "dashboard_kernel_memory_growth": Figure.of([memory[-1] / memory[warm]]),
        "dashboard_kernel_busy": Figure.of(busy),
    }
    return row, figures


def _cpu_s(threads: Sequence[threading.Thread]) -> float:
    """Processor seconds of the threads that a kernel would have: one reads rows, one sends them."""
    clocks = [time.pthread_getcpuclockid(each.ident) for each in threads if each.ident is not None]
    return sum(map(time.clock_gettime, clocks))


def _heap(session: Any) -> float:
    """Bytes of the page's scripts and elements, after a garbage collection."""
    session.send("HeapProfiler.collectGarbage")
    usage = session.send("Runtime.getHeapUsage")
    return float(usage["usedSize"]) + float(usage.get("embedderHeapUsedSize", 0))
