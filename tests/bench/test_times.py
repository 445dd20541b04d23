"""What the benchmark of predictions makes of times, without running anything."""

from dataclasses import replace

import pytest

from workbench.bench.predict import cases
from workbench.bench.predict.times import STEPS, Machines, TimeErrors, is_unsure, merged, steps_of
from workbench.plan.experiment.experiment import LocalSGD
from workbench.plan.machine.device import Sample
from workbench.plan.machine.machine import Machine


def row(model, predicted, measured, noise=0.0):
    times = {"predicted ms": predicted, "measured ms": measured, "noise ms": noise, "band": 0.25}
    error = abs(predicted / measured - 1)
    return {"model": model, "plan": "p", "optimizer": "sgd", "precision": "fp32"} | (
        times | {"time error": error}
    )


def test_figures_of_times():
    rows = [row("a", 11.0, 10.0), row("a", 19.0, 20.0), row("a", 30.0, 24.0)]
    rows += [row("b", 4.0, 5.0), row("b", 3.0, 6.0), {"model": "c", "traffic": "equal"}]
    found = TimeErrors.of(rows)
    assert found.taus() == {"a": pytest.approx(1.0), "b": pytest.approx(-1.0)}
    figures = found.figures()
    assert figures["time_error_median"].median == pytest.approx(0.2)
    assert figures["time_error_worst"].median == pytest.approx(0.5)
    assert figures["time_bias_median"].median == pytest.approx(-0.05)
    assert figures["time_inside_band"].median == pytest.approx(0.8)
    assert figures["kendall_tau"].min == pytest.approx(-1.0)
    assert "over 5 cases" in found.note()


def test_pairs_that_differ_by_no_more_than_noise_are_in_no_order():
    rows = [row("a", 10.0, 10.0, 1.0), row("a", 9.0, 11.0, 1.0), row("a", 20.0, 13.5, 1.0)]
    found = TimeErrors.of([*rows, row("b", 1.0, 1.0, 9.0), row("b", 2.0, 1.5, 9.0)])
    assert found.clear_taus() == {"a": (1.0, 2)}
    assert found.taus()["a"] == pytest.approx(1 / 3)
    assert "a 1.00 of 2 pairs" in found.note()


def test_whose_rounds_differ_has_more_of_them():
    assert not is_unsure([[1.0, 0.5], [1.08, 1.0], [1.0, 1.0]])
    assert is_unsure([[1.0, 0.5], [1.0, 1.2], [1.0, 1.0]])
    assert not is_unsure([[1.0], [1.05], [1.0], [9.0], [0.1]])


class Calibrating:
    """Notes what it is asked to measure."""

    def __init__(self):
        self.asked = []

    def calibrate(self, *plans, **how):
        assert how["keep"] is False
        self.asked.append((len(plans), how["rows"], how["precision"], how["machine"] is None))
        device = Machine.preset("cpu-10gbe").devices[0].replace(step_s=1.0)
        return Machine.preset("cpu-10gbe").replace(devices=(device,), unevenness=0.5)


def test_plans_are_measured_at_their_rows_on_devices_and_links_measured_once():
    cluster, quick = Calibrating(), list(cases.quick())
    machines = Machines(cluster, plan_s=1.0)
    assert machines.of(quick[0]) is None
    machines.measure(quick)
    assert cluster.asked == [(2, (8,), "fp32", True), (1, (4,), "fp32", False)]
    assert machines.of(quick[0]) == machines.of(quick[1])
    machines.measure(quick[:1])
    assert cluster.asked[2:] == [(1, (8,), "fp32", False)]
    assert machines.of(quick[0]).unevenness == pytest.approx(0.5)


def sampled(forward_s, rows=8, **fields):
    sample = Sample(
        kind="conv2d", key="k", precision="fp32", rows=rows, flops=1, bytes=1,
        forward_s=forward_s, backward_s=2 * forward_s,
    )  # fmt: skip
    device = Machine.preset("cpu-10gbe").devices[0].replace(samples=(sample,), **fields)
    return Machine.preset("cpu-10gbe").replace(devices=(device,))


def test_of_several_calibrations_the_middle_counts():
    three = [sampled(1.0, step_s=3.0), sampled(9.0), sampled(2.0, step_s=1.0)]
    three[1] = three[1].replace(unevenness=3.0)
    found = merged(three)
    (sample,) = found.devices[0].samples
    assert (sample.forward_s, sample.backward_s) == (2.0, 4.0)
    assert found.devices[0].step_s == 1.0
    assert found.unevenness == pytest.approx(3**0.5)
    assert merged(three[:1]) == three[0]


def test_devices_that_one_calibration_tells_apart_stay_apart():
    one, two = sampled(1.0), sampled(3.0)
    apart = one.replace(devices=(*one.devices, *two.devices))
    found = merged([apart, one])
    assert [device.samples[0].forward_s for device in found.devices] == [1.0, 2.0]


def test_many_cases_are_metered_and_of_each_model_several_are_timed():
    assert len(cases.TIMED) >= 40
    assert len(cases.TIMED) + len(cases.METERED) >= 60
    models = [model for model, *_ in cases.TIMED]
    assert min(map(models.count, models)) >= 2


def test_local_sgd_is_timed_from_one_averaging_to_another():
    (case, *_) = cases.quick()
    assert steps_of(case) == STEPS
    assert steps_of(replace(case, timed=False)) == 0
    for every, steps in ((2, 4), (9, 9), (1, 3)):
        local = replace(case, experiment=case.experiment.replace(sync=LocalSGD(every=every)))
        assert steps_of(local) == steps
