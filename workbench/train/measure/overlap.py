"""What a sum of gradients costs the computation that goes on beside it.

alone       | products |            | sum |
together    | start | product | poll | product | poll | ... | wait |
"""

import time
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from workbench.comm.collectives import Pending, start_all_reduce
from workbench.comm.groups.group import Group
from workbench.train.measure.repeating import Repetition, Until, estimate, finish, slowest

_UNTIL = Until(relative=0.05, least=5, most=40)
_BYTES = 2**23
_SIDE = 192  # of the matrices that are multiplied
_PARTS = 12  # after each of which the sum is polled, as after a layer's gradient
_LONGER = 2.0  # products take so many times as long as the sum


@dataclass(frozen=True)
class Beside:
    """What a sum costs.

    Attributes:
        busy: the share of its time that this rank's thread spends on it.
        slowdown: how many times as long products take while it goes on.
    """

    busy: float
    slowdown: float


def beside(group: Group, whole: Group, device: torch.device, within_s: float) -> Beside:
    """Measures a sum of gradients beside products, and both alone.

    Args:
        group: that sums.
        whole: all ranks, which do the same at the same time.
        device: of this rank.
        within_s: for this.
    """
    a = torch.ones(_SIDE, _SIDE, device=device)
    flat = group.buffer(_BYTES // 4, a)

    def products(times: int, pending: Pending | None = None) -> tuple[float, float]:
        """Seconds of the products, and of the polls between them."""
        computing = polling = 0.0
        for _ in range(_PARTS):
            began = time.perf_counter()
            for _ in range(times):
                a @ a
            finish(device)
            computed = time.perf_counter()
            if pending is not None:
                pending.poll()
            computing += computed - began
            polling += time.perf_counter() - computed
        return computing, polling

    one = slowest(min(products(1)[0] for _ in range(3)), whole) / _PARTS
    alone_s = slowest(_alone(group, flat, device), whole)
    times = max(1, round(_LONGER * alone_s / _PARTS / one))
    repetition = Repetition(whole, _UNTIL, within_s)
    seconds: list[NDArray[np.float64]] = []
    while repetition.goes_on(seconds):
        alone, _ = products(times)
        began = time.perf_counter()
        pending = start_all_reduce(flat, group)
        started = time.perf_counter() - began
        together, polled = products(times, pending)
        began = time.perf_counter()
        pending.wait()
        finish(device)
        waited = time.perf_counter() - began
        again = _alone(group, flat, device)
        seconds.append(np.array([alone, together, started + polled + waited, again]))
    alone, together, spent, summing = estimate(np.stack(seconds))[0].tolist()
    return Beside(min(1.0, spent / summing), max(1.0, together / alone))


def _alone(group: Group, flat: Tensor, device: torch.device) -> float:
    began = time.perf_counter()
    start_all_reduce(flat, group).wait()
    finish(device)
    return time.perf_counter() - began
