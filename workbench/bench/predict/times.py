"""Step times of real runs beside predicted ones, and how long predictions take.

Each case is timed in several rounds, some seconds apart and with the other cases of its model in
between; its machine is calibrated between them. A round's median of a few steps differs from round
to round: half of the range is the case's noise; a case with much noise has more rounds, of which
the fastest and the slowest do not count as noise.

Predictions are timed in processor time: widgets ask for one at every move of a mouse.
"""

import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from scipy.stats import kendalltau

from workbench.bench.plot import Bar, Chart
from workbench.bench.predict.cases import Case
from workbench.bench.report import Cell, Figure
from workbench.model.tracing.trace import trace
from workbench.plan.experiment.experiment import SGD, Experiment, LocalSGD
from workbench.plan.graph.graph import Graph
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
    """The cells of a case's row that concern time.

    Args:
        prediction: the prediction of the case.
        rounds: the seconds of a step on every rank, for each round [rounds, ranks].
    """
    measured, noise = _measured(rounds)
    return {
        "measured ms": measured * 1e3,
        "noise ms": noise * 1e3,
        "predicted ms": prediction.step_time * 1e3,
        "time error": abs(prediction.step_time / measured - 1),
        "band": prediction.error,
    }


def is_unsure(rounds: Sequence[Sequence[float]]) -> bool:
    """Whether more rounds would help.

    Args:
        rounds: the seconds of a step on every rank, for each round [rounds, ranks].
    """
    measured, noise = _measured(rounds)
    return noise > _SURE * measured


def _measured(rounds: Sequence[Sequence[float]]) -> tuple[float, float]:
    """(seconds of a step on the slowest rank, the median over rounds; the noise around it)."""
    slowest = sorted(max(ranks) for ranks in rounds)
    inner = slowest[1:-1] if len(slowest) > ROUNDS else slowest
    return statistics.median(slowest), (inner[-1] - inner[0]) / 2


@dataclass(frozen=True)
class TimeErrors:
    """The summary of rows with times.

    Attributes:
        rows: the rows of the report; those without times are left out.
    """

    rows: tuple[Mapping[str, Cell], ...]

    @classmethod
    def of(cls, rows: Iterable[Mapping[str, Cell]]) -> "TimeErrors":
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
            "time_error_worst": Figure(*(max(errors),) * 3),
            "time_bias_median": Figure.of(bias),
            "time_inside_band": Figure(share, min(inside), max(inside)),
            "kendall_tau": Figure.of([tau for tau, _ in self.clear_taus().values()]),
            **({"kendall_tau_all_pairs": Figure.of(every)} if every else {}),
        }

    def taus(self) -> dict[str, float]:
        """Kendall's tau of predicted and measured times, for each model with two cases or more."""
        found = {}
        for model, mine in self._models().items():
            predicted = [float(row["predicted ms"]) for row in mine]
            measured = [float(row["measured ms"]) for row in mine]
            found[model] = float(kendalltau(predicted, measured).statistic)
        return found

    def clear_taus(self) -> dict[str, tuple[float, int]]:
        """(Kendall's tau, number) of pairs that differ by more than both their noises, by model."""
        found = {}
        for model, mine in self._models().items():
            signs = [_agree(a, b) for a, b in combinations(mine, 2) if _differ(a, b)]
            if signs:
                found[model] = statistics.fmean(signs), len(signs)
        return found or {"no model": (0.0, 0)}

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

    def chart(self) -> Chart:
        """Predicted over measured times, as a chart."""
        bars = []
        for row in self.rows:
            ratio = _ratio(row)
            name = f"{row['model']}, {row['plan']}, {row['optimizer']}, {row['precision']}"
            bars.append(Bar(name, ratio, ratio, ratio, True))
        return Chart("predicted / measured step time", tuple(bars), target=1.0)

    def _models(self) -> dict[str, list[Mapping[str, Cell]]]:
        found: dict[str, list[Mapping[str, Cell]]] = {}
        for row in self.rows:
            found.setdefault(str(row["model"]), []).append(row)
        return {model: mine for model, mine in found.items() if len(mine) > 1}


def _ratio(row: Mapping[str, Cell]) -> float:
    return float(row["predicted ms"]) / float(row["measured ms"])


def _differ(a: Mapping[str, Cell], b: Mapping[str, Cell]) -> bool:
    apart = abs(float(a["measured ms"]) - float(b["measured ms"]))
    return apart > float(a["noise ms"]) + float(b["noise ms"])


def _agree(a: Mapping[str, Cell], b: Mapping[str, Cell]) -> float:
    """1 where the prediction orders two cases like the measurement, else -1."""
    measured = float(a["measured ms"]) < float(b["measured ms"])
    return 1.0 if (float(a["predicted ms"]) < float(b["predicted ms"])) == measured else -1.0


WORLD, FAR = 8, 65_536


def resnet152() -> Graph:
    """ResNet-152 for images of 224 x 224 in 1,000 classes."""
    return trace("resnet152", input_shape=(3, 224, 224), num_classes=1000)


def speed_figures(graph: Graph, times: int) -> dict[str, Figure]:
    """Times memory, traffic and time of a hybrid plan on 8 ranks, and memory and time on 65,536.

    Args:
        graph: the graph of the plan.
        times: how often each is predicted.
    """
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
    return Figure(statistics.median(taken), min(taken), max(taken))
