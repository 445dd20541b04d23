"""Peak memory, traffic and time of real steps, against their predictions.

    memory    each case runs three steps on local engines; the last one is metered, tensor by
              tensor, and its collectives are recorded; every rank is compared
    times     the same, and steps of some cases are timed in several rounds, and compared with
              predictions for a machine that was calibrated between these rounds
    texts     memory and traffic of transformers, whose figures are separate
    packages  the same of models of the package transformers, where it is installed
    speed     how long predictions take

`times` is left out where `memory` is the only part; `texts` and `packages` with `quick`, and where
cases are named.
"""

import importlib
import statistics
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from importlib.util import find_spec
from itertools import groupby
from typing import Any, TypeVar

from workbench.bench.harness.progress import Part, Progress
from workbench.bench.harness.report import MIB, Cell, Figure, Report
from workbench.bench.predict import cases, stepping
from workbench.bench.predict.cases import Case
from workbench.bench.predict.stepping import Observed, watched
from workbench.bench.predict.times import (
    MOST_ROUNDS,
    ROUNDS,
    Machines,
    TimeErrors,
    is_unsure,
    resnet152,
    speed_figures,
    steps_of,
    time_cells,
)
from workbench.client.calibration.devices import unmeasured, with_workspaces
from workbench.client.cluster import Cluster
from workbench.client.leases import lent
from workbench.model.vision import torchvision
from workbench.plan.experiment.experiment import Experiment
from workbench.plan.machine.machine import Machine
from workbench.predict.prediction import Prediction, predict
from workbench.store.errors import RunError
from workbench.train.measure.device import workspaces

T = TypeVar("T", Case, tuple[Case, list[list[float]]])
Rows = list[dict[str, Cell]]

PLAN_S, QUICK_PLAN_S, QUICK_BARE_S = 3.0, 0.5, 2.0
SEPARATE = ("texts", "packages")  # parts with figures of their own
OF_SEPARATE = ("memory_error_median", "memory_error_worst", "traffic_exact")
SPARE_S = 3.0  # for each case that is timed


def run(progress: Progress, *, quick: bool, cases_named: str = "") -> Iterator[Report]:
    """Measures every case; `quick` takes a tiny VGG under two plans.

    `cases_named` is a part of the names of the measured cases: "resnet18", or also a plan.

    Raises:
        ValueError: there is no case of this name.
        ImportError: transformers is to be measured, and is not installed.
    """
    has_transformers = find_spec("transformers") is not None
    if progress.only == "packages" and not has_transformers:
        raise ImportError("transformers is missing: pip install 'parallel-workbench[models]'")
    every = list(cases.quick() if quick else cases.every(cases_named))
    if not every:
        raise ValueError(f"no case is named {cases_named!r}: a name is 'resnet18, hybrid, 4'")
    # Cases with times have their memory too.
    part = "memory" if progress.only == "memory" else "times"
    if part == "memory":
        every = [replace(case, timed=False) for case in every]
    texts = [] if quick or cases_named else list(cases.texts())
    models = {name: _by_model(some) for name, some in ((part, every), ("texts", texts))}
    # Within a budget one is measured in any case: with times, and soon.
    models[part].sort(key=lambda alike: (not any(case.timed for case in alike), len(alike)))
    seconds = {"memory": 4.0, "times": 25.0}  # of a case
    packages = cases.TYPES if texts and has_transformers else ()
    progress.begin(
        *(
            Part(name, len(models.get(name, ())), len(every) * each / len(models[part]))
            for name, each in seconds.items()
        ),
        *([Part("texts", len(models["texts"]), 40)] if texts else []),
        *([Part("packages", len(packages), 20)] if packages else []),
        Part("speed", 1, 10),
    )
    bench: _Bench | None = None
    if any(map(progress.wants, (*models, "packages"))):
        with Cluster(cases.ENGINES, timeout=300.0) as cluster:
            limits = (QUICK_PLAN_S, QUICK_BARE_S) if quick else (PLAN_S,)
            bench = _Bench(cluster, Machines(cluster, *limits), progress, quick=quick)
            for name in models:
                for alike in progress.each(name, models[name]):
                    bench.measure(alike, "texts" if name == "texts" else "")
                    yield _report(bench, {})
            for name in progress.each("packages", packages):
                bench.measure_package(name)
                yield _report(bench, {})
    for _ in progress.each("speed"):
        graph = every[0].experiment.plan.graph if quick else resnet152()
        yield _report(bench, speed_figures(graph, times=1 if quick else 5))


def _by_model(every: Sequence[Case]) -> list[list[Case]]:
    by_model = groupby(every, key=lambda case: case.experiment.plan.graph.fingerprint)
    return [list(alike) for _, alike in by_model]


def _report(bench: "_Bench | None", speed: dict[str, Figure]) -> Report:
    rows = [] if bench is None else [row for some in bench.rows.values() for row in some]
    if bench is None or not rows:
        return Report("predict", (), speed, () if bench is None else tuple(bench.notes))
    figures = _figures(bench.rows[""])
    for part in SEPARATE:
        separate = _figures(bench.rows[part])
        figures |= {f"{part}_{name}": separate[name] for name in OF_SEPARATE if name in separate}
    text: tuple[str, ...] = (
        "Peak: live tensor bytes of the rank that is furthest off, shared memory included; "
        f"{statistics.fmean(float(row['memory error']) for row in rows):.2%} off on average over "
        f"{len(rows)} cases, on a machine that has measured what its kernels take. Without a "
        "machine, on GPUs with one that has not measured that, it lies in the band of the "
        "prediction.",
        "Traffic: calls, messages and bytes of every collective of every rank.",
    )
    times = TimeErrors.of(rows)
    if times.rows:
        figures |= times.figures()
        text = (*text, times.note())
    notes = (*text, *bench.notes)
    return Report("predict", tuple(rows), figures | speed, notes, engines=cases.ENGINES)


def _figures(rows: Rows) -> dict[str, Figure]:
    """The figures of memory and traffic; none without cases."""
    if not rows:
        return {}
    errors = [float(row["memory error"]) for row in rows]
    bands = [float(row["most MiB"]) / float(row["least MiB"]) - 1 for row in rows]
    return {
        "memory_error_median": Figure.of(errors),
        "memory_error_worst": Figure.of([max(errors)]),
        "memory_in_band": Figure.of([float(row["in band"] == "yes") for row in rows]),
        "memory_band": Figure.of(bands),
        "traffic_exact": Figure.of([float(row["traffic"] == "equal") for row in rows]),
    }


class _Bench:
    """Runs cases, and announces each; `rows` has "" and the parts with separate figures.

    `spare_s` seconds are left for rounds of cases whose rounds differ.
    """

    def __init__(
        self, cluster: Cluster, machines: Machines, progress: Progress, *, quick: bool
    ) -> None:
        self.cluster, self.machines, self._quick = cluster, machines, quick
        self._progress = progress
        self._kernels = KernelMachines(cluster)
        self.rows: dict[str, Rows] = {part: [] for part in ("", *SEPARATE)}
        self.notes: list[str] = []
        self.spare_s = 0.0

    def measure(self, alike: Sequence[Case], part: str) -> None:
        """Measures the cases of one model: rounds, and between them its machines."""
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
            self.rows[part].append(_row(case, machine, self._kernels.bare, seen, own))

    def measure_package(self, name: str) -> None:
        """Measures a type of the package transformers, or notes why not."""
        torchvision()  # which transformers imports
        try:
            alike = cases.of_package(importlib.import_module("transformers"), name)
        except Exception as error:  # whatever a package raises for sizes that do not fit
            self.notes.append(f"transformers/{name}: {type(error).__name__}: {error}")
        else:
            self.measure(alike, "packages")

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
        try:
            return self._called("measure", case)
        except RunError as error:  # out of memory, perhaps; the others continue
            self.notes.append(f"{case.name}: {error}")
            return []

    def _seconds(self, case: Case) -> list[float]:
        return self._called("time_steps", case)

    def _called(self, function: str, case: Case) -> Any:
        task = f"{stepping.__name__}:{function}"
        module, timed = case.module, steps_of(case)
        return self.cluster.call(task, case.experiment, module=module, timed=timed)

    def _steps(self, some: Iterable[T]) -> Iterator[T]:
        for one in some:
            self._progress.tell(f"  {(one if isinstance(one, Case) else one[0]).name}")
            yield one


def _row(
    case: Case,
    machine: Machine,
    bare: Machine | None,
    ranks: Sequence[Observed],
    taken: Sequence[Sequence[float]] | None,
) -> dict[str, Cell]:
    experiment = case.experiment
    prediction = predict(experiment.plan, machine, experiment)
    times = {} if taken is None else time_cells(prediction, taken)
    traffic = {"traffic": "equal" if _is_traffic_equal(prediction, ranks) else "NOT EQUAL"}
    return {**_memory_cells(case, prediction, bare, ranks), **traffic, **times}


def _is_traffic_equal(prediction: Prediction, ranks: Sequence[Observed]) -> bool:
    step = watched(prediction.experiment)
    return all(
        sorted(prediction.traffic.rows(rank, step)) == sorted(seen.traffic)
        for rank, seen in enumerate(ranks)
    )


def _memory_cells(
    case: Case, prediction: Prediction, bare: Machine | None, ranks: Sequence[Observed]
) -> dict[str, Cell]:
    """The peak of the rank that is furthest off, and whether it lies in the band without a machine.

    On GPUs, whose bands are other than those of CPUs, without one means: with the GPUs as they are
    before their kernels are measured (`bare`).
    """
    memory, experiment = prediction.memory, case.experiment
    errors = [abs(memory[rank].peak_bytes / seen.peak_bytes - 1) for rank, seen in enumerate(ranks)]
    rank = max(range(len(errors)), key=errors.__getitem__)
    guessed = predict(experiment.plan, bare, experiment).memory
    bands = [guessed[rank].band for rank in range(len(ranks))]
    inside = [
        least <= seen.peak_bytes <= most for (least, most), seen in zip(bands, ranks, strict=True)
    ]
    return {
        "model": experiment.plan.graph.source.name,
        "plan": case.plan,
        "optimizer": experiment.optimizer.kind,
        "precision": experiment.precision,
        "measured MiB": ranks[rank].peak_bytes / MIB,
        "predicted MiB": memory[rank].peak_bytes / MIB,
        "memory error": errors[rank],
        "without machine MiB": guessed[rank].peak_bytes / MIB,
        "least MiB": bands[rank][0] / MIB,
        "most MiB": bands[rank][1] / MIB,
        "in band": "yes" if all(inside) else "NO",
        "when": str(memory[rank].moment),
    }


_WORKSPACES = f"{workspaces.__module__}:{workspaces.__name__}"
_DEVICES_S = 2.0
# Its speeds do not matter here.
_ON_ONE_HOST = Machine.preset("cpu-10gbe").replace(ranks_per_host=None, across=None)


class KernelMachines:
    """Machines of a cluster's engines of which only the kernels' workspaces are measured."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._known: dict[int, Machine] = {}

    def of(self, experiment: Experiment) -> Machine:
        """The machine for an experiment, measured unless it is known.

        Raises:
            RunError: a rank failed.
        """
        world = experiment.plan.world_size
        machine = self._known.get(world) or self.bare or _ON_ONE_HOST
        micro_batch = -(-experiment.batch_size // experiment.accumulate)
        rows = max(experiment.plan.rows_of(micro_batch))
        if unmeasured(machine.devices, experiment, (rows,)):
            with lent(self._cluster, experiment.plan, "a calibration") as lease:
                measured = lease.call(_WORKSPACES, experiment, {"rows": (rows,)})
            machine = machine.replace(devices=with_workspaces(machine.devices, measured))
            self._known[world] = machine
        return machine

    @cached_property
    def bare(self) -> Machine | None:
        """The machine before its kernels are measured; None: it has CPUs alone."""
        if all(device.kind == "cpu" for device in self._cluster.devices):
            return None
        return self._cluster.calibrate(within_s=_DEVICES_S, keep=False)
