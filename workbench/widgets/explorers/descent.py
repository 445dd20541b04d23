"""Late and coarse gradients on a loss whose curvatures are known: every step is really computed.

Linear regression without noise: each of p workers has rows X[r] of a matrix, and all have the loss

    f(w) = 1/2 sum_r |X[r] (w - w*)|^2,     gradient of worker r: X[r]^T X[r] (w - w*)

whose curvatures, the eigenvalues of X^T X, are 1 = h[1] > ... > h[n] = 1/condition, evenly spaced
on a logarithmic scale. Steps are those of `Pipelined`: with S[t] the summed gradient at w[t],

    v <- m v + S[t - (width - 1)],     w <- w - lr v,     nothing while t < width - 1

so that lr is in units of the largest curvature's inverse: `plan.stability.limit` is its limit.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from workbench.plan.codec import Codec
from workbench.widgets.explorers.coded import Sum

WORKERS, ROWS, LENGTH = 4, 24, 64
# Of the loss at the beginning: beyond these it is computed no more.
DIVERGED, REACHED = 1e3, 1e-7


@dataclass(frozen=True)
class Descent:
    """One run.

    Attributes:
        lr: learning rate times the largest curvature.
        width: of the pipeline; 1 is synchronous.
        momentum: of SGD.
        codec: that gradients go through, or None.
        condition: the largest curvature over the smallest.
        steps: how many.
    """

    lr: float
    width: int = 1
    momentum: float = 0.0
    codec: Codec | None = None
    condition: float = 20.0
    steps: int = 400


@lru_cache(maxsize=256)
def losses(run: Descent) -> tuple[float, ...]:
    """The loss before each step and after the last, relative to the first.

    It ends early where it has grown a thousandfold, or is next to nothing.
    """
    rows, distance = _problem(run.condition)
    summed = Sum(run.codec, WORKERS, LENGTH)
    waiting: list[NDArray[np.float32]] = []
    velocity = np.zeros(LENGTH)
    found: list[float] = []
    for _ in range(run.steps + 1):
        missed = rows @ distance
        found.append(float((missed**2).sum() / 2))
        if not REACHED * found[0] < found[-1] < DIVERGED * found[0]:
            break
        gradients = np.matmul(missed[:, None, :], rows)[:, 0, :].astype(np.float32)
        waiting.append(summed(gradients))
        if len(waiting) == run.width:
            velocity = run.momentum * velocity + waiting.pop(0)
            distance = distance - run.lr * velocity
    return tuple(loss / found[0] for loss in found)


def steps_to(curve: tuple[float, ...], target: float) -> int | None:
    """Steps until the loss is below a target and stays there; None: it is not at the end."""
    above = [step for step, loss in enumerate(curve) if not loss <= target]
    last = above[-1] + 1 if above else 0
    return last if last < len(curve) else None


@lru_cache(maxsize=8)
def _problem(condition: float) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Rows of each worker [workers, rows, length], and the distance at the beginning."""
    generator = np.random.default_rng(0)
    curvatures = np.geomspace(1.0, 1.0 / condition, LENGTH)
    left = np.linalg.qr(generator.standard_normal((WORKERS * ROWS, LENGTH)))[0]
    right = np.linalg.qr(generator.standard_normal((LENGTH, LENGTH)))[0]
    rows = (left * np.sqrt(curvatures)) @ right.T
    # As much in every direction, so that each curvature matters.
    distance = right @ np.ones(LENGTH)
    return rows.reshape(WORKERS, ROWS, LENGTH), distance
