"""Constants come back from times that were made of them."""

import numpy as np
import pytest

from workbench.plan.io.errors import MachineError
from workbench.predict.closed_form import FLAT, Measurement, Network, fit

NETWORK = Network(1.2e8, latency_s=1e-4, reduction_s_per_byte=2e-10, synchronisation_s=5e-4)
SIZES = (1e3, 1e5, 1e6, 1e7)


def measured(*algorithms, workers=(2, 4), noise=0.0, network=NETWORK):
    draw = np.random.default_rng(0)
    return [
        Measurement(p, n, network.seconds(FLAT[name](p, n, None)) * draw.normal(1, noise), name)
        for name in algorithms
        for p in workers
        for n in SIZES
    ]


def test_exact_times_give_the_constants_back():
    found = fit(measured("ring", "recursive_doubling"))
    for name in ("bandwidth", "latency_s", "reduction_s_per_byte", "synchronisation_s"):
        assert getattr(found.network, name) == pytest.approx(getattr(NETWORK, name), rel=1e-6)
    assert found.worst_error < 1e-9


def test_noise_shows_in_residuals_and_intervals():
    many = [one for _ in range(3) for one in measured("ring", "direct", noise=0.03)]
    found = fit(many, held={"reduction_s_per_byte": 2e-10})
    assert 0.005 < found.median_error < 0.06
    beta = 1 / found.network.bandwidth
    assert abs(beta - 1 / NETWORK.bandwidth) < 2 * found.half_widths["s_per_byte"]
    assert 0 < found.half_widths["s_per_byte"] < 0.1 * beta
    assert found.half_widths["reduction_s_per_byte"] == 0
    assert "1/β" in repr(found)


def test_no_constant_is_negative():
    free = Network(1e8, synchronisation_s=1e-3)
    noisy = measured("ring", "direct", noise=0.05, network=free)
    found = fit(noisy, held={"reduction_s_per_byte": 0})
    assert found.network.latency_s >= 0
    assert found.network.bandwidth == pytest.approx(1e8, rel=0.1)


def test_what_cannot_be_told_apart_is_said():
    with pytest.raises(MachineError, match=r"cannot tell s_per_byte from .*reduction_s_per_byte"):
        fit(measured("ring", "direct"), held={"latency_s": 0})
    with pytest.raises(MachineError, match="cannot tell latency_s"):
        fit(measured("ring", workers=(4,)), held={"reduction_s_per_byte": 0})


@pytest.mark.parametrize(
    ("measurements", "held", "said"),
    [
        ([], {}, "0 measurements for 4 constants"),
        (measured("ring")[:2], {}, "2 measurements for 4 constants"),
        (measured("ring"), {"speed": 1.0}, "no constants .'speed'.; there are latency_s"),
        ([Measurement(4, 100, 0.0)] * 9, {}, "positive numbers of seconds"),
    ],
)
def test_refused(measurements, held, said):
    with pytest.raises(MachineError, match=said):
        fit(measurements, held=held)


def test_times_that_do_not_grow():
    same = [Measurement(4, n, 1e-3) for n in (1e3, 1e4)]
    with pytest.raises(MachineError, match="do not grow with the bytes"):
        fit([*same, Measurement(4, 1e6, 1e-5)], held={"reduction_s_per_byte": 0, "latency_s": 1e-3})
