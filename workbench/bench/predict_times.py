"""Step times of real runs beside predicted ones.

Each case is timed in several rounds, some seconds apart and with the other cases of its model in
between; its machine is calibrated between them. What a round's median of a few steps says differs
from round to round: half of the range is the case's noise, and who has much of it has more rounds,
of which the fastest and the slowest count for no noise.
"""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from scipy.stats import kendalltau

from workbench.bench.cases import Case
from workbench.bench.plot import Bar, Chart
from workbench.bench.report import Cell, Figure
from workbench.plan.experiment import LocalSGD
from workbench.predict.prediction import Prediction

ROUNDS, MOST_ROUNDS = 3, 5
STEPS = 3  # of a round, that are timed
_SURE = 0.05  # noise, relative, that calls for no more rounds


def steps_of(case: Case) -> int:
    """How many steps are timed in a round; of local SGD, from one averaging to another."""
    if not case.timed:
        return 0
    sync = case.experiment.sync
    every = sync.every if isinstance(sync, LocalSGD) else 1
    return math.ceil(STEPS / every) * every


def time_cells(prediction: Prediction, rounds: Sequence[Sequence[float]]) -> dict[str, Cell]:
    """What the table says of a case's time.

    Args:
        prediction: of it.
        rounds: of each round, seconds of a step on every rank.
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
        rounds: of each round, seconds of a step on every rank.
    """
    measured, noise = _measured(rounds)
    return noise > _SURE * measured


def _measured(rounds: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Seconds of a step of the slowest rank: the median over rounds, and the noise around it."""
    slowest = sorted(max(ranks) for ranks in rounds)
    inner = slowest[1:-1] if len(slowest) > ROUNDS else slowest
    return statistics.median(slowest), (inner[-1] - inner[0]) / 2


@dataclass(frozen=True)
class Times:
    """What rows with times come to.

    Attributes:
        rows: of the report; those without times are left out.
    """

    rows: tuple[Mapping[str, Cell], ...]

    @classmethod
    def of(cls, rows: Iterable[Mapping[str, Cell]]) -> "Times":
        """Of a whole report's rows."""
        return cls(tuple(row for row in rows if "time error" in row))

    def figures(self) -> dict[str, Figure]:
        """Errors, how well the order within each model is kept, and how good the bands are."""
        errors = [float(row["time error"]) for row in self.rows]
        bias = [_ratio(row) - 1 for row in self.rows]
        inside = [float(float(row["time error"]) <= float(row["band"])) for row in self.rows]
        share = statistics.fmean(inside)
        return {
            "time_error_median": Figure.of(errors),
            "time_error_worst": Figure(*(max(errors),) * 3),
            "time_bias_median": Figure.of(bias),
            "time_inside_band": Figure(share, min(inside), max(inside)),
            "kendall_tau": Figure.of([tau for tau, _ in self.clear_taus().values()]),
            "kendall_tau_all_pairs": Figure.of(list(self.taus().values())),
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
        """The same of pairs that differ by more than both their noises; and how many there are."""
        found = {}
        for model, mine in self._models().items():
            signs = [_agree(a, b) for a, b in combinations(mine, 2) if _differ(a, b)]
            if signs:
                found[model] = statistics.fmean(signs), len(signs)
        return found or {"no model": (0.0, 0)}

    def note(self) -> str:
        """What a reader must know of the figures."""
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
        """Predicted over measured times."""
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
    """1 where the prediction orders two cases as they are, else -1."""
    measured = float(a["measured ms"]) < float(b["measured ms"])
    return 1.0 if (float(a["predicted ms"]) < float(b["predicted ms"])) == measured else -1.0
