"""What the benchmark of predictions makes of times, without running anything."""

from dataclasses import replace

import pytest

from workbench.bench import cases
from workbench.bench.predict_times import STEPS, Machines, Times, is_timed, steps_of
from workbench.plan.experiment import LocalSGD
from workbench.plan.machine import Machine


def row(model, predicted, measured):
    times = {"predicted ms": predicted, "measured ms": measured}
    error = abs(predicted / measured - 1)
    return {"model": model, "plan": "p", "optimizer": "sgd", "precision": "fp32"} | (
        times | {"time error": error}
    )


def test_figures_of_times():
    rows = [row("a", 11.0, 10.0), row("a", 19.0, 20.0), row("a", 30.0, 24.0)]
    rows += [row("b", 4.0, 5.0), row("b", 3.0, 6.0), {"model": "c", "traffic": "equal"}]
    found = Times.of(rows)
    assert found.taus() == {"a": pytest.approx(1.0), "b": pytest.approx(-1.0)}
    figures = found.figures()
    assert figures["time_error_median"].median == pytest.approx(0.2)
    assert figures["time_error_worst"].median == pytest.approx(0.5)
    assert figures["kendall_tau"].min == pytest.approx(-1.0)
    assert "over 5 cases" in found.note()
    assert len(found.chart().bars) == 5


class Calibrating:
    """Notes what it is asked to measure."""

    def __init__(self):
        self.asked = []

    def calibrate(self, *plans, **how):
        self.asked.append((len(plans), how["rows"], how["precision"], how["fresh"]))
        return Machine.preset("cpu-10gbe")


def test_every_kind_of_case_is_calibrated_once_and_only_from_now_on():
    cluster, quick = Calibrating(), list(cases.quick())
    machines = Machines(cluster, quick)
    for _ in range(2):
        for case in quick:
            assert machines.of(case).name == Machine.preset("cpu-10gbe").name
    assert cluster.asked == [(2, [16, 32], "fp32", True)]


def test_local_sgd_is_timed_from_one_averaging_to_another():
    (case, *_) = cases.quick()
    assert is_timed(case)
    assert steps_of(case) == STEPS
    for every, steps in ((3, 6), (9, 9), (1, 5)):
        local = replace(case, experiment=case.experiment.replace(sync=LocalSGD(every=every)))
        assert steps_of(local) == steps
