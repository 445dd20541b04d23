"""Step times of real runs beside predicted ones, and how long predictions take.

Each case is timed in several rounds, some seconds apart and with the other cases of its model in
between; its machine is calibrated between them. A round's median of a few steps differs from round
to round: half of the range is the case's noise; a case with much noise has more rounds, of which
the fastest and the slowest do not count as noise.

Between the rounds only what the cases of one model need is calibrated: each of their plans, at the
rows of its ranks; more than once, since a host is slower at one moment than at another. Devices and
links are measured once for each number of ranks. The user's stored machine is not replaced.

Predictions are timed in processor time: widgets ask for one at every move of a mouse.
"""

import math
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations

from scipy.stats import kendalltau

from workbench.bench.harness.report import Cell, Figure, Row
from workbench.bench.predict.cases import Case
from workbench.client.cluster import Cluster
from workbench.model.tracing.trace import trace
from workbench.plan.experiment.experiment import SGD, Experiment, LocalSGD
from workbench.plan.graph.graph import Graph
from workbench.plan.machine.device import Device, Sample
from workbench.plan.machine.machine import Machine
from workbench.plan.plans.plan import Plan
from workbench.predict.prediction import Prediction, predict

ROUNDS, MOST_ROUNDS = 3, 5
STEPS = 3  # of a round, that are timed
_SURE = 0.05  # noise, relative, that calls for no more rounds


def steps_of(case: Case) -> int:
    """How many steps are timed in a round; with local SGD, from one averaging to another."""
    if not case.timed:
        return 0
    sync = case.experiment.sync
    every = sync.every if isinstance(sync, LocalSGD) else 1
    return math.ceil(STEPS / every) * every


def time_cells(prediction: Prediction, rounds: Sequence[Sequence[float]]) -> dict[str, Cell]:
    """The cells of a case's row that concern time; seconds of a step are [rounds, ranks]."""
    measured, noise = _measured(rounds)
    return {
        "measured ms": measured * 1e3,
        "noise ms": noise * 1e3,
        "predicted ms": prediction.step_time * 1e3,
        "time error": abs(prediction.step_time / measured - 1),
        "band": prediction.error,
    }


def is_unsure(rounds: Sequence[Sequence[float]]) -> bool:
    """Whether more rounds would help; seconds of a step are [rounds, ranks]."""
    measured, noise = _measured(rounds)
    return noise > _SURE * measured


def _measured(rounds: Sequence[Sequence[float]]) -> tuple[float, float]:
    """(seconds of a step on the slowest rank, the median over rounds; the noise around it)."""
    slowest = sorted(max(ranks) for ranks in rounds)
    inner = slowest[1:-1] if len(slowest) > ROUNDS else slowest
    return statistics.median(slowest), (inner[-1] - inner[0]) / 2


@dataclass(frozen=True)
class TimeErrors:
    """The summary of the report's rows that have times."""

    rows: tuple[Row, ...]

    @classmethod
    def of(cls, rows: Iterable[Row]) -> "TimeErrors":
        """The summary of a whole report's rows."""
        return cls(tuple(row for row in rows if "time error" in row))

    def figures(self) -> dict[str, Figure]:
        """Errors, rank correlation within each model, and the quality of the error bands."""
        errors = [float(row["time error"]) for row in self.rows]
        bias = [_ratio(row) - 1 for row in self.rows]
        inside = [float(float(row["time error"]) <= float(row["band"])) for row in self.rows]
        share = statistics.fmean(inside)
        every = list(self.taus().values())
        return {
            "time_error_median": Figure.of(errors),
            "time_error_worst": Figure.of([max(errors)]),
            "time_bias_median": Figure.of(bias),
            "time_inside_band": Figure(share, min(inside), max(inside)),
            "kendall_tau": Figure.of([tau for tau, _ in self.clear_taus().values()]),
            **({"kendall_tau_all_pairs": Figure.of(every)} if every else {}),
        }

    def taus(self) -> dict[str, float]:
        """Kendall's tau of predicted and measured times, for each model with two cases or more."""
        taus = {}
        for model, rows in self._models().items():
            predicted = [float(row["predicted ms"]) for row in rows]
            measured = [float(row["measured ms"]) for row in rows]
            taus[model] = float(kendalltau(predicted, measured).statistic)
        return taus

    def clear_taus(self) -> dict[str, tuple[float, int]]:
        """(Kendall's tau, number) of pairs that differ by more than both their noises, by model."""
        taus = {}
        for model, rows in self._models().items():
            signs = [_agree(a, b) for a, b in combinations(rows, 2) if _differ(a, b)]
            if signs:
                taus[model] = statistics.fmean(signs), len(signs)
        return taus or {"no model": (0.0, 0)}

    def note(self) -> str:
        """The note that a reader needs to judge the figures."""
        clear = ", ".join(
            f"{model} {tau:.2f} of {n} pairs" for model, (tau, n) in self.clear_taus().items()
        )
        every = ", ".join(f"{model} {tau:.2f}" for model, tau in self.taus().items())
        noise = statistics.median(
            float(row["noise ms"]) / float(row["measured ms"]) for row in self.rows
        )
        return (
            f"Time: of the slowest rank, the median of {ROUNDS} to {MOST_ROUNDS} rounds of "
            f"{STEPS} steps, over {len(self.rows)} cases; machines were calibrated between these. "
            f"Noise, half the range of a case's rounds: {noise:.1%} in the median. Kendall's tau "
            f"of the pairs of a model that differ by more than both their noises: {clear}; of all: "
            f"{every}."
        )

    def _models(self) -> dict[str, list[Row]]:
        models: dict[str, list[Row]] = {}
        for row in self.rows:
            models.setdefault(str(row["model"]), []).append(row)
        return {model: rows for model, rows in models.items() if len(rows) > 1}


def _ratio(row: Row) -> float:
    return float(row["predicted ms"]) / float(row["measured ms"])


def _differ(a: Row, b: Row) -> bool:
    apart = abs(float(a["measured ms"]) - float(b["measured ms"]))
    return apart > float(a["noise ms"]) + float(b["noise ms"])


def _agree(a: Row, b: Row) -> float:
    """1 where the prediction orders two cases like the measurement, else -1."""
    measured = float(a["measured ms"]) < float(b["measured ms"])
    return 1.0 if (float(a["predicted ms"]) < float(b["predicted ms"])) == measured else -1.0


def merged(machines: Sequence[Machine]) -> Machine:
    """The median of one or more calibrations that measured the same layers.

    Links are the first one's. Unevenness adds up as variances do.
    """
    ranks = max(len(machine.devices) for machine in machines)
    devices = [_device([machine.device(rank) for machine in machines]) for rank in range(ranks)]
    return machines[0].replace(
        devices=tuple(devices),
        unevenness=statistics.fmean(machine.unevenness**2 for machine in machines) ** 0.5,
        jitter_s=statistics.fmean(machine.jitter_s for machine in machines),
    )


def _device(devices: Sequence[Device]) -> Device:
    """The median of one rank's device."""
    first, samples = devices[0], dict[tuple[str, str, int], list[Sample]]()
    for device in devices:
        for sample in device.samples:
            samples.setdefault((sample.key, sample.precision, sample.rows), []).append(sample)
    return first.replace(
        samples=tuple(map(_sample, samples.values())),
        load_s_per_byte=statistics.median(device.load_s_per_byte for device in devices),
        step_s=statistics.median(device.step_s for device in devices),
        update_s_per_byte={
            kind: statistics.median(device.update_s_per_byte[kind] for device in devices)
            for kind in first.update_s_per_byte
        },
    )


def _sample(samples: Sequence[Sample]) -> Sample:
    return samples[0].replace(
        forward_s=statistics.median(sample.forward_s for sample in samples),
        backward_s=statistics.median(sample.backward_s for sample in samples),
        error=statistics.median(sample.error for sample in samples),
    )


BARE_S = 16.0  # to measure devices and links, about

Kind = tuple[str, int, str]
"""The graph, world size and precision that a calibration is for."""


class Machines:
    """Calibrates a cluster for groups of cases in turn.

    It takes about `plan_s` for one plan at one number of rows, and `bare_s` for devices and links.
    """

    def __init__(self, cluster: Cluster, plan_s: float, bare_s: float = BARE_S) -> None:
        self._cluster, self._plan_s, self._bare_s = cluster, plan_s, bare_s
        self._bare: dict[int, Machine] = {}
        self._measured: dict[Kind, list[Machine]] = {}

    def measure(self, cases: Iterable[Case]) -> None:
        """Calibrates now for these cases, once more if it has before."""
        alike: dict[Kind, list[Case]] = {}
        for case in cases:
            alike.setdefault(kind_of(case), []).append(case)
        for kind, some in alike.items():
            self._measured.setdefault(kind, []).append(self._calibrated(kind[1], some))

    def of(self, case: Case) -> Machine | None:
        """The machine that was measured for a case; None: there is none."""
        machines = self._measured.get(kind_of(case))
        return None if machines is None else merged(machines)

    def _calibrated(self, world: int, alike: Sequence[Case]) -> Machine:
        first = alike[0]
        wanted: dict[int, dict[Plan, None]] = {}
        for case in alike:
            plan = case.experiment.plan.with_rounds("BK").with_recompute("*", recompute=False)
            for rows in rows_of(case.experiment):
                wanted.setdefault(rows, {}).setdefault(plan)
        machine, seen = self._bare.get(world), list[Machine]()
        for rows, plans in wanted.items():
            machine = self._cluster.calibrate(
                *plans,
                rows=(rows,),
                precision=first.experiment.precision,
                within_s=self._plan_s * len(plans) + (self._bare_s if machine is None else 0.0),
                module=first.module,
                machine=machine,
                keep=False,
            )
            self._bare.setdefault(world, bare(machine))
            seen.append(machine)
        *_, whole = seen
        even = (
            statistics.fmean(one.unevenness**2 for one in seen) ** 0.5
        )  # each call returns its own
        return whole.replace(
            unevenness=even, jitter_s=statistics.fmean(one.jitter_s for one in seen)
        )


def kind_of(case: Case) -> Kind:
    """The graph, world size and precision of a case."""
    experiment = case.experiment
    return experiment.plan.graph.fingerprint, experiment.plan.world_size, experiment.precision


def rows_of(experiment: Experiment) -> list[int]:
    """The rows of a rank in a pass; for a tail in rounds, also those that give the group's rows."""
    plan = experiment.plan
    own = max(1, experiment.batch_size // experiment.accumulate // plan.world_size)
    if plan.rounds == "BK" or plan.tail is None:
        return [own]
    return sorted({own, max(1, own // plan.tail.group_size)})


def bare(machine: Machine) -> Machine:
    """The machine without the measurements of layers and steps of a model."""
    devices = tuple(
        device.replace(samples=(), step_s=0.0, load_s_per_byte=0.0) for device in machine.devices
    )
    return machine.replace(devices=devices, unevenness=0.0, jitter_s=0.0)


WORLD, FAR = 8, 65_536


def resnet152() -> Graph:
    """ResNet-152 for images of 224 x 224 in 1,000 classes."""
    return trace("resnet152", input_shape=(3, 224, 224), num_classes=1000)


def speed_figures(graph: Graph, times: int) -> dict[str, Figure]:
    """Times memory, traffic and time of a hybrid plan on 8 ranks, and memory and time on 65,536."""
    plan, machine = Plan.hybrid(graph, WORLD), Machine.preset("h100-nvlink")
    experiment = Experiment(
        plan=plan,
        data="synthetic",
        optimizer=SGD(lr=0.1, momentum=0.9),
        steps=1,
        batch_size=8 * FAR,
    )

    def near() -> None:
        prediction = predict(plan, machine, experiment)
        _ = prediction.memory, prediction.traffic, prediction.step_time

    def far() -> None:
        prediction = predict(plan, machine, experiment).at(world_size=FAR)
        _ = prediction.memory, prediction.step_time

    return {
        "predict_ms": _figure(near, 1e3, times),
        "at_65536_s": _figure(far, 1.0, times),
    }


def _figure(call: Callable[[], None], unit: float, times: int) -> Figure:
    taken = []
    for _ in range(times):
        began = time.process_time()
        call()
        taken.append((time.process_time() - began) * unit)
    return Figure.of(taken)
