"""Step times of real runs beside predicted ones, on machines that were calibrated just before."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from scipy.stats import kendalltau

from workbench.bench import cases
from workbench.bench.cases import Case
from workbench.bench.plot import Bar, Chart
from workbench.bench.report import Cell, Figure
from workbench.bench.stepping import Observed
from workbench.cluster.cluster import Cluster
from workbench.plan.experiment import Experiment, LocalSGD
from workbench.plan.machine import Machine
from workbench.predict.prediction import Prediction

STEPS = 5
PLAN_S = 6.0  # to calibrate one plan at one number of rows, about
MODELS = (cases.SMALL, *cases.MODELS)

# Graph, world size and precision: what a calibration is for.
_Kind = tuple[str, int, str]


def is_timed(case: Case) -> bool:
    """Whether a case's time is predicted: of models of which there are several, to be ordered."""
    return case.experiment.plan.graph.source.name in MODELS


def steps_of(case: Case) -> int:
    """How many steps are timed; of local SGD, from one averaging to another."""
    sync = case.experiment.sync
    if not is_timed(case):
        return 0
    every = sync.every if isinstance(sync, LocalSGD) else 1
    return math.ceil(STEPS / every) * every


class Machines:
    """Calibrates what cases need, when it is first needed.

    What earlier calibrations of the same hardware have left is not used: only what has been
    measured since this object was made.

    Args:
        cluster: runs the cases.
        every: all cases that will be asked for.
    """

    def __init__(self, cluster: Cluster, every: Iterable[Case]) -> None:
        self._cluster = cluster
        self._cases: dict[_Kind, list[Case]] = {}
        for case in every:
            self._cases.setdefault(_kind(case), []).append(case)
        self._found: dict[_Kind, Machine] = {}
        self._world_sizes: set[int] = set()

    def of(self, case: Case) -> Machine:
        """The machine for a case."""
        kind = _kind(case)
        if kind not in self._found:
            self._found[kind] = self._calibrated(self._cases[kind])
        return self._found[kind]

    def _calibrated(self, alike: Sequence[Case]) -> Machine:
        experiment = alike[0].experiment
        plans = tuple(dict.fromkeys(case.experiment.plan for case in alike))
        rows = sorted({count for case in alike for count in _rows(case.experiment)})
        world = experiment.plan.world_size
        machine = self._cluster.calibrate(
            *plans,
            rows=rows,
            precision=experiment.precision,
            within_s=PLAN_S * len(plans) * len(rows),
            fresh=world not in self._world_sizes,
            module=alike[0].module,
        )
        self._world_sizes.add(world)
        return machine


def time_cells(prediction: Prediction, found: Sequence[Observed]) -> dict[str, Cell]:
    """What the table says of a case's time."""
    measured = max(seen.step_s for seen in found)
    return {
        "measured ms": measured * 1e3,
        "predicted ms": prediction.step_time * 1e3,
        "time error": abs(prediction.step_time / measured - 1),
    }


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
        """Errors, and how well the order within each model is kept."""
        errors = [float(row["time error"]) for row in self.rows]
        return {
            "time_error_median": Figure.of(errors),
            "time_error_worst": Figure(*(max(errors),) * 3),
            "kendall_tau": Figure.of(list(self.taus().values())),
        }

    def taus(self) -> dict[str, float]:
        """Kendall's tau of predicted and measured times, for each model with two cases or more."""
        found = {}
        for model in dict.fromkeys(str(row["model"]) for row in self.rows):
            mine = [row for row in self.rows if row["model"] == model]
            if len(mine) > 1:
                predicted = [float(row["predicted ms"]) for row in mine]
                measured = [float(row["measured ms"]) for row in mine]
                found[model] = float(kendalltau(predicted, measured).statistic)
        return found

    def note(self) -> str:
        """What a reader must know of the figures."""
        taus = ", ".join(f"{model} {tau:.2f}" for model, tau in self.taus().items())
        return (
            f"Time: of the slowest rank, the median of {STEPS} steps, over {len(self.rows)} cases; "
            f"the machines were calibrated in the same session. Kendall's tau: {taus}."
        )

    def chart(self) -> Chart:
        """Predicted over measured times."""
        bars = []
        for row in self.rows:
            ratio = float(row["predicted ms"]) / float(row["measured ms"])
            name = f"{row['model']}, {row['plan']}, {row['optimizer']}, {row['precision']}"
            bars.append(Bar(name, ratio, ratio, ratio, True))
        return Chart("predicted / measured step time", tuple(bars), target=1.0)


def _kind(case: Case) -> _Kind:
    experiment = case.experiment
    return experiment.plan.graph.fingerprint, experiment.plan.world_size, experiment.precision


def _rows(experiment: Experiment) -> set[int]:
    """Rows of a rank in a pass; of a tail in rounds, as many as give the group's rows."""
    plan = experiment.plan
    own = max(1, experiment.batch_size // experiment.accumulate // plan.world_size)
    if plan.rounds == "BK" or plan.tail is None:
        return {own}
    return {own, max(1, own // plan.tail.group_size)}
