"""Peak memory, traffic and time of real steps, against their predictions.

    memory    each case runs three steps on local engines; the last one is metered, tensor by
              tensor, and its collectives are recorded; every rank is compared
    times     the same, and steps of some cases are timed in several rounds, and compared with
              predictions for a machine that was calibrated between these rounds
    texts     memory and traffic of transformers, whose figures are apart; not with `quick`, nor
              where cases are named
    speed     how long predictions take

`times` is left out where `memory` is the only part.
"""

import statistics
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import TypeVar

from workbench.bench.plot import Bar, Chart
from workbench.bench.predict import cases
from workbench.bench.predict.cases import Case
from workbench.bench.predict.machines import Machines
from workbench.bench.predict.memory import KernelMachines, memory_cells, memory_figures
from workbench.bench.predict.stepping import Observed, watched
from workbench.bench.predict.times import (
    MOST_ROUNDS,
    ROUNDS,
    TimeErrors,
    is_unsure,
    resnet152,
    speed_figures,
    steps_of,
    time_cells,
)
from workbench.bench.progress import Part, Progress
from workbench.bench.report import Cell, Figure, Report
from workbench.client.cluster import Cluster
from workbench.plan.machine.machine import Machine
from workbench.predict.prediction import Prediction, predict
from workbench.store.errors import RunError

T = TypeVar("T", Case, tuple[Case, list[list[float]]])

PLAN_S, QUICK_PLAN_S, QUICK_BARE_S = 3.0, 0.5, 2.0
STEPPING = "workbench.bench.predict.stepping:measure"
OF_TEXTS = ("memory_error_median", "memory_error_worst", "traffic_exact")
SPARE_S = 3.0  # for each case that is timed


def run(progress: Progress, *, quick: bool, cases_named: str = "") -> Iterator[Report]:
    """Measures every case; `quick` takes a tiny VGG under two plans.

    Args:
        progress: the progress of the models, each of which has several cases.
        quick: whether to take few cases.
        cases_named: a part of the names of the measured cases: "resnet18", or also a plan.

    Raises:
        ValueError: there is no case of this name.
    """
    every = list(cases.quick() if quick else cases.every(cases_named))
    if not every:
        raise ValueError(f"no case is named {cases_named!r}: a name is 'resnet18, hybrid, 4'")
    # Those with times have their memory too.
    part = "memory" if progress.only == "memory" else "times"
    if part == "memory":
        every = [replace(case, timed=False) for case in every]
    texts = [] if quick or cases_named else list(cases.texts())
    models = {name: _by_model(some) for name, some in ((part, every), ("texts", texts))}
    # Within a budget one is measured in any case: with times, and soon.
    models[part].sort(key=lambda alike: (not any(case.timed for case in alike), len(alike)))
    some = {"memory": 4.0, "times": 25.0}  # seconds of a case
    progress.begin(
        *(
            Part(name, len(models.get(name, ())), len(every) * seconds / len(models[part]))
            for name, seconds in some.items()
        ),
        *([Part("texts", len(models["texts"]), 40)] if texts else []),
        Part("speed", 1, 10),
    )
    bench: _Bench | None = None
    if any(map(progress.wants, models)):
        with Cluster(cases.ENGINES, timeout=300.0) as cluster:
            seconds = (QUICK_PLAN_S, QUICK_BARE_S) if quick else (PLAN_S,)
            bench = _Bench(cluster, Machines(cluster, *seconds), progress, quick=quick)
            for name in models:
                for alike in progress.each(name, models[name]):
                    bench.measure(alike, bench.of_texts if name == "texts" else bench.rows)
                    yield _report(bench, {})
    for _ in progress.each("speed"):
        graph = every[0].experiment.plan.graph if quick else resnet152()
        yield _report(bench, speed_figures(graph, times=1 if quick else 5))


def _by_model(every: Sequence[Case]) -> list[list[Case]]:
    """The cases, those of one model together."""
    by_model = groupby(every, key=lambda case: case.experiment.plan.graph.fingerprint)
    return [list(alike) for _, alike in by_model]


def _report(bench: "_Bench | None", speed: Mapping[str, Figure]) -> Report:
    rows = [] if bench is None else [*bench.rows, *bench.of_texts]
    if bench is None or not rows:
        return Report("predict", (), speed, () if bench is None else tuple(bench.notes))
    of_texts = _figures(bench.of_texts)
    figures = _figures(bench.rows)
    figures |= {f"texts_{name}": of_texts[name] for name in OF_TEXTS if name in of_texts}
    text: tuple[str, ...] = (
        "Peak: live tensor bytes of the rank that is furthest off, shared memory included; "
        f"{statistics.fmean(float(row['memory error']) for row in rows):.2%} off on average over "
        f"{len(rows)} cases, on a machine that has measured what its kernels take. Without a "
        "machine, on GPUs with one that has not measured that, it lies in the band of the "
        "prediction.",
        "Traffic: calls, messages and bytes of every collective of every rank.",
    )
    charts = [_chart(rows)]
    times = TimeErrors.of(rows)
    if times.rows:
        figures |= times.figures()
        text = (*text, times.note())
        charts.append(times.chart())
    notes = (*text, *bench.notes)
    figures |= speed
    return Report("predict", tuple(rows), figures, notes, tuple(charts), engines=cases.ENGINES)


def _figures(rows: Sequence[dict[str, Cell]]) -> dict[str, Figure]:
    """Those of memory and traffic; none without cases."""
    if not rows:
        return {}
    exact = Figure.of([float(row["traffic"] == "equal") for row in rows])
    return {**memory_figures(rows), "traffic_exact": exact}


class _Bench:
    """Runs cases, and tells of each.

    Args:
        cluster: the cluster that runs them.
        machines: the machines that are calibrated for them.
        progress: whom to tell.
        quick: whether to calibrate once for the cases of each model, and repeat none.

    Attributes:
        rows: the rows of the report.
        of_texts: the rows of the part "texts".
        notes: the notes on cases that could not be run.
        spare_s: the seconds that are left for rounds of cases whose rounds differ.
    """

    def __init__(
        self, cluster: Cluster, machines: Machines, progress: Progress, *, quick: bool
    ) -> None:
        self.cluster, self.machines, self._quick = cluster, machines, quick
        self._progress = progress
        self._kernels = KernelMachines(cluster)
        self.rows: list[dict[str, Cell]] = []
        self.of_texts: list[dict[str, Cell]] = []
        self.notes: list[str] = []
        self.spare_s = 0.0

    def measure(self, alike: Sequence[Case], rows: list[dict[str, Cell]]) -> None:
        """Measures the cases of one model: rounds, and between them its machines.

        Args:
            alike: the cases.
            rows: the rows to add theirs to.
        """
        first = [(case, seen) for case in self._steps(alike) if (seen := self._observed(case))]
        timed = [(case, [[one.step_s for one in seen]]) for case, seen in first if case.timed]
        for index in range(ROUNDS - 1):
            if index == 0 or not self._quick:
                self.machines.measure(case for case, _ in timed)
            for case, rounds in self._steps(timed):
                rounds.append(self._seconds(case))
        self.spare_s += 0.0 if self._quick else SPARE_S * len(timed)
        self._repeat(timed)
        taken = iter(timed)
        for case, seen in first:
            own = next(taken)[1] if case.timed else None
            machine = self.machines.of(case) if case.timed else None
            machine = machine or self._kernels.of(case.experiment)
            rows.append(_row(case, machine, self._kernels.bare, seen, own))

    def _repeat(self, timed: Sequence[tuple[Case, list[list[float]]]]) -> None:
        """Runs more rounds of the cases whose rounds differ, as long as there is time."""
        for _ in range(MOST_ROUNDS - ROUNDS):
            unsure = [one for one in timed if is_unsure(one[1])]
            for case, rounds in self._steps(unsure):
                if self.spare_s <= 0:
                    return
                began = time.perf_counter()
                rounds.append(self._seconds(case))
                self.spare_s -= time.perf_counter() - began

    def _observed(self, case: Case) -> list[Observed]:
        """The measurements of each rank; empty if the case could not be run."""
        timed = steps_of(case)
        try:
            return self.cluster.call(STEPPING, case.experiment, module=case.module, timed=timed)
        except RunError as error:  # out of memory, perhaps; the others continue
            self.notes.append(f"{case.name}: {error}")
            return []

    def _seconds(self, case: Case) -> list[float]:
        task, timed = "workbench.bench.predict.stepping:time_steps", steps_of(case)
        return self.cluster.call(task, case.experiment, module=case.module, timed=timed)

    def _steps(self, some: Iterable[T]) -> Iterator[T]:
        """Tells of each case."""
        for one in some:
            self._progress.tell(f"  {(one if isinstance(one, Case) else one[0]).name}")
            yield one


def _row(
    case: Case,
    machine: Machine,
    bare: Machine | None,
    found: Sequence[Observed],
    taken: Sequence[Sequence[float]] | None,
) -> dict[str, Cell]:
    experiment = case.experiment
    prediction = predict(experiment.plan, machine, experiment)
    times = {} if taken is None else time_cells(prediction, taken)
    traffic = {"traffic": "equal" if is_traffic_equal(prediction, found) else "NOT EQUAL"}
    return {**memory_cells(case, prediction, bare, found), **traffic, **times}


def is_traffic_equal(prediction: Prediction, found: Sequence[Observed]) -> bool:
    """Whether the traffic of every rank is the predicted one."""
    step = watched(prediction.experiment)
    return all(
        sorted(prediction.traffic.rows(rank, step)) == sorted(seen.traffic)
        for rank, seen in enumerate(found)
    )


def _chart(rows: list[dict[str, Cell]]) -> Chart:
    bars = []
    for row in rows:
        ratio = float(row["predicted MiB"]) / float(row["measured MiB"])
        name = f"{row['model']}, {row['plan']}, {row['optimizer']}, {row['precision']}"
        bars.append(Bar(name, ratio, ratio, ratio, True))
    return Chart("predicted / measured peak", tuple(bars), target=1.0)
