"""Late and coarse gradients on losses so small that every step is really computed.

Steps are those of `Pipelined`: with S[t] the gradient at w[t], summed over workers,

    v <- m v + S[t - (width - 1)],     w <- w - lr v,     nothing while t < width - 1

where lr is in units of the inverse of the largest curvature at the beginning: on a quadratic loss,
`plan.stability.limit` is its limit.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from workbench.plan.codec import Codec
from workbench.widgets.explorers.coded import Sum
from workbench.widgets.explorers.problems import WORKERS, Array, Digits, Name, problem

# Of the loss at the beginning: beyond these it is computed no more.
DIVERGED, REACHED = 1e3, 1e-7


@dataclass(frozen=True)
class Descent:
    """One run.

    Attributes:
        lr: learning rate times the largest curvature at the beginning.
        width: of the pipeline; 1 is synchronous.
        momentum: of SGD.
        codec: that gradients go through, or None.
        condition: of the quadratic loss, the largest curvature over the smallest.
        problem: which loss.
        steps: how many.
    """

    lr: float
    width: int = 1
    momentum: float = 0.0
    codec: Codec | None = None
    condition: float = 20.0
    problem: Name = "quadratic"
    steps: int = 400


def losses(run: Descent) -> tuple[float, ...]:
    """The loss before each step and after the last, relative to the first.

    It ends early where it has grown a thousandfold, or is next to nothing.
    """
    return _descended(run)[0]


def recognised(run: Descent) -> float | None:
    """The share of digits that are recognised at the end; None of another loss."""
    loss = problem(run.problem, run.condition)
    return loss.recognised(_descended(run)[1]) if isinstance(loss, Digits) else None


@lru_cache(maxsize=256)
def _descended(run: Descent) -> tuple[tuple[float, ...], Array]:
    """Relative losses, and the values at the end."""
    loss = problem(run.problem, run.condition)
    values, velocity = loss.start, np.zeros(len(loss.start))
    summed = Sum(run.codec, WORKERS, len(values))
    waiting: list[NDArray[np.float32]] = []
    found: list[float] = []
    for step in range(run.steps + 1):
        found.append(loss.loss(values))
        if not REACHED * found[0] < found[-1] < DIVERGED * found[0]:
            break
        waiting.append(summed(loss.gradients(values, step)))
        if len(waiting) == run.width:
            velocity = run.momentum * velocity + waiting.pop(0)
            values = values - run.lr / loss.curvature * velocity
    return tuple(each / found[0] for each in found), values


def steps_to(curve: tuple[float, ...], target: float) -> int | None:
    """Steps until the loss is below a target and stays there; None: it is not at the end."""
    above = [step for step, loss in enumerate(curve) if not loss <= target]
    last = above[-1] + 1 if above else 0
    return last if last < len(curve) else None
