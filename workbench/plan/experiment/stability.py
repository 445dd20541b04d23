"""The largest stable learning rate with late gradients: exact for a quadratic, else a guide.

Along a direction of curvature h, a gradient is h w. Steps with gradients that are d = width - 1
steps late, and momentum m, are a linear recurrence in w, which decays if and only if all roots of
its characteristic polynomial lie within the unit circle. With x = lr h it is

    z^(d+2) - (1+m) z^(d+1) + m z^d + x z                    momentum as torch.optim.SGD has it
    z^(d+2) - (1+m) z^(d+1) + m z^d + x ((1+m) z - m)        the same with nesterov

(derived). So steps are stable for x below

    no momentum              2 sin(pi / (4d + 2)): 2, 1, 0.618, 0.445, ... for width 1, 2, 3, 4, ...
    momentum m               2 (1 + m) for width 1, but only 1 - m for width 2

Source: 2 sin(pi / (4d+2)) is the condition of Levin and May 1976 for w[t+1] = w[t] - x w[t-d].
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from workbench.plan.experiment.experiment import SGD, Experiment, Pipelined, Synchronous

_HALVINGS = 60


@dataclass(frozen=True)
class Curvature:
    """The largest curvature of a loss at some weights: the Hessian's largest eigenvalue.

    Attributes:
        value: the eigenvalue, in loss per squared unit of the weights.
        change: the relative change of the last iteration: how far it may still be from the
            eigenvalue.
        step: the number of training steps after which the weights were taken.
        batches: the number of global batches over which the loss is a mean.
    """

    value: float
    change: float
    step: int
    batches: int

    def __str__(self) -> str:
        return f"curvature {self.value:.3g} (±{self.change:.0%}) after {self.step} steps"


def growth(x: float, width: int = 1, momentum: float = 0.0, nesterov: bool = False) -> float:
    """The factor by which a step multiplies the distance to the minimum, in the long run.

    Args:
        x: the learning rate times the curvature.
        width: the width of the pipeline; 1 is synchronous.
        momentum: the momentum of SGD.
        nesterov: whether SGD's momentum is Nesterov's.
    """
    polynomial = np.zeros(width + 2)
    polynomial[:3] = 1.0, -(1.0 + momentum), momentum
    polynomial[-2:] += (x * (1.0 + momentum), -x * momentum) if nesterov else (x, 0.0)
    return float(np.abs(np.roots(polynomial)).max())


@lru_cache(maxsize=256)
def limit(width: int = 1, momentum: float = 0.0, nesterov: bool = False) -> float:
    """The bound of learning rate times curvature below which steps are stable.

    Raises:
        ValueError: the width is less than 1, or the momentum not in [0, 1).
    """
    if width < 1 or not 0 <= momentum < 1:
        raise ValueError(
            f"width must be 1 or more and momentum in [0, 1), got {width} and {momentum}"
        )
    # No late gradient allows for more than the newest without nesterov.
    stable, unstable = 0.0, 2.0 * (1.0 + momentum) * (1.0 + 1e-9)
    for _ in range(_HALVINGS):
        middle = (stable + unstable) / 2
        if growth(middle, width, momentum, nesterov) < 1.0:
            stable = middle
        else:
            unstable = middle
    return stable


def largest_lr(experiment: Experiment, curvature: Curvature) -> float | None:
    """The learning rate below which an experiment's steps are stable at this curvature.

    None if it is unknown: for all but SGD, whose steps are scaled by past gradients, with groups
    or dampening, for LocalSGD, and where the curvature is not positive. Weight decay adds its own
    curvature.
    """
    value, sync = experiment.optimizer, experiment.sync
    if not isinstance(value, SGD) or not isinstance(sync, Synchronous | Pipelined):
        return None
    if value.groups or value.dampening or value.maximize:
        return None
    steepest = curvature.value + value.weight_decay
    if steepest <= 0:
        return None
    width = sync.width if isinstance(sync, Pipelined) else 1
    return limit(width, value.momentum, value.nesterov) / steepest


def advice(experiment: Experiment, curvature: Curvature) -> str:
    """Why a pipelined experiment is likely to diverge, with what would be stable; else ""."""
    value, sync = experiment.optimizer, experiment.sync
    most = largest_lr(experiment, curvature)
    late = isinstance(sync, Pipelined) and 1 < sync.width and sync.warmup < experiment.steps
    if most is None or not late or value.lr <= most:
        return ""
    at_once = largest_lr(experiment.replace(sync=Synchronous()), curvature)
    assert isinstance(sync, Pipelined)
    return (
        f"likely to diverge: at a {curvature}, {sync.inexact} and lr {value.lr:g}, but steps are "
        f"stable only below lr {most:.3g} (synchronous ones below {at_once:.3g}); lower lr or "
        f"momentum"
    )
