"""The largest stable learning rate of a quadratic with late gradients.

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

from functools import lru_cache

import numpy as np

_HALVINGS = 60


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
