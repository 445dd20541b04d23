"""How unequally fast ranks are that have the same to do: from parts of steps to two figures.

Steps are cut into 1, 2, 4, ... stretches. In each, the last rank is behind the mean of all by so
many seconds, as many as ranks would wait there if they met. `predict/time/lagging.py` says how that
depends on the stretch's length:

    behind = largest(k) sqrt((unevenness t)^2 + jitter t)
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from workbench.client.calibration.devices import as_much_work
from workbench.plan.experiment import Experiment
from workbench.plan.fitting import costs
from workbench.plan.machine import Machine
from workbench.predict.time.lagging import largest
from workbench.train.measure.layers import LayersMeasured

_NOTHING = 1e-18  # seconds squared


@dataclass(frozen=True)
class Behind:
    """Stretches of one length.

    Attributes:
        seconds: of the mean rank.
        squared: seconds by which the last of two or more ranks is behind the mean, over the
            expected largest of so many normal values, squared.
    """

    seconds: float
    squared: float


def stretches_of(
    experiment: Experiment, found: Sequence[Sequence[LayersMeasured]], *, own_devices: bool
) -> list[Behind]:
    """What all ranks measured of a plan; nothing where some had more to do.

    Args:
        experiment: that was measured.
        found: of each rank, at each number of rows.
        own_devices: whether each rank has a device of its own, whose mean speed is known.
    """
    stretches: list[Behind] = []
    for column in zip(*found, strict=True):
        if len(column) < 2 or not as_much_work(experiment, column):
            continue
        parts = np.stack([own.parts for own in column]).astype(np.float64)
        if own_devices:
            parts *= parts.mean() / parts.mean(axis=(1, 2), keepdims=True)
        stretches += behind(parts)
    return stretches


def behind(parts: NDArray[np.floating]) -> list[Behind]:
    """Of one plan at one number of rows.

    Args:
        parts: [ranks, steps, a power of two]: seconds, the same steps on all ranks.
    """
    ranks, steps, count = parts.shape
    found = []
    often = 1
    while often <= count:
        stretches = parts.reshape(ranks, steps, often, -1).sum(axis=3)
        late = stretches.max(axis=0) - stretches.mean(axis=0)
        usual = float(np.median(late.mean(axis=1)))
        late_s = usual / float(largest(np.array(float(ranks))))
        found.append(Behind(float(stretches.mean()), late_s**2))
        often *= 2
    return found


def unequal(machine: Machine, found: Sequence[Behind]) -> Machine:
    """The machine with what fits best to all stretches; as it is where there are none."""
    lasting = [one for one in found if one.seconds > 0]
    if not lasting:
        return machine
    terms = np.array([(one.seconds**2, one.seconds) for one in lasting])
    squared = np.array([max(one.squared, _NOTHING) for one in lasting])
    uneven, jitter = costs(terms, squared).tolist()
    return machine.replace(unevenness=uneven**0.5, jitter_s=jitter)
