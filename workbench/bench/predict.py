"""Peak memory and traffic of real steps, beside what was predicted for them.

Each case runs three steps or more on local engines; the last one is metered, tensor by tensor,
and its collectives are recorded. Every rank is compared.
"""

import statistics

from workbench.bench import cases
from workbench.bench.cases import Case
from workbench.bench.plot import Bar, Chart
from workbench.bench.report import Cell, Figure, Report
from workbench.bench.stepping import Observed, watched
from workbench.cluster.cluster import Cluster
from workbench.cluster.errors import RunError
from workbench.predict.prediction import Prediction, predict

MIB = 2**20


def run(*, quick: bool) -> Report:
    """Measures every case; `quick` takes a small VGG under two plans."""
    rows: list[dict[str, Cell]] = []
    notes: list[str] = []
    with Cluster(cases.ENGINES, timeout=300.0) as cluster:
        for case in cases.quick() if quick else cases.every():
            model = case.experiment.plan.graph.source.name
            try:
                found: list[Observed] = cluster.call(
                    "workbench.bench.stepping:measure", case.experiment, module=case.module
                )
            except RunError as error:  # for want of memory, perhaps; the others go on
                notes.append(f"{model}, {case.plan}: {error}")
            else:
                rows.append(_row(case, predict(case.experiment.plan, None, case.experiment), found))
    errors = [float(row["memory error"]) for row in rows]
    worst = max(errors)
    figures = {
        "memory_error_median": Figure.of(errors),
        "memory_error_worst": Figure(worst, worst, worst),
        "traffic_exact": Figure.of([float(row["traffic"] == "equal") for row in rows]),
    }
    text = (
        f"Peak: live tensor bytes of the rank that is furthest off, shared memory included; "
        f"{statistics.fmean(errors):.2%} off on average over {len(rows)} cases.",
        "Traffic: calls, messages and bytes of every collective of every rank.",
        *notes,
    )
    return Report("predict", tuple(rows), figures, text, (_chart(rows),))


def _row(case: Case, prediction: Prediction, found: list[Observed]) -> dict[str, Cell]:
    memory, experiment = prediction.memory, case.experiment
    errors = [abs(memory[rank].peak_bytes / seen.peak_bytes - 1) for rank, seen in enumerate(found)]
    rank = max(range(len(errors)), key=errors.__getitem__)
    step = watched(experiment)
    equal = all(
        sorted(prediction.traffic.rows(rank, step)) == sorted(seen.traffic)
        for rank, seen in enumerate(found)
    )
    return {
        "model": experiment.plan.graph.source.name,
        "plan": case.plan,
        "optimizer": experiment.optimizer.kind,
        "precision": experiment.precision,
        "measured MiB": found[rank].peak_bytes / MIB,
        "predicted MiB": memory[rank].peak_bytes / MIB,
        "memory error": errors[rank],
        "when": str(memory[rank].moment),
        "traffic": "equal" if equal else "NOT EQUAL",
    }


def _chart(rows: list[dict[str, Cell]]) -> Chart:
    bars = []
    for row in rows:
        ratio = float(row["predicted MiB"]) / float(row["measured MiB"])
        name = f"{row['model']}, {row['plan']}, {row['optimizer']}, {row['precision']}"
        bars.append(Bar(name, ratio, ratio, ratio, True))
    return Chart("predicted / measured peak", tuple(bars), target=1.0)
