"""Small fits: a curve that never falls, and a sum of non-negative costs."""

from collections.abc import Sequence
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def rising(values: Sequence[float]) -> list[float]:
    """The non-decreasing sequence nearest to `values`, by least squares.

    Source: pool adjacent violators (Ayer et al. 1955).
    """
    pools: list[tuple[float, int]] = []
    for value in values:
        mean, count = value, 1
        while pools and pools[-1][0] > mean:
            before, many = pools.pop()
            mean = (before * many + mean * count) / (many + count)
            count += many
        pools.append((mean, count))
    return [mean for mean, count in pools for _ in range(count)]


def costs(terms: Array, seconds: Array) -> Array:
    """The non-negative x of least relative error in terms @ x = seconds.

    Args:
        terms: [samples, few], all >= 0.
        seconds: [samples], all > 0.

    Each set of non-zero terms is tried, since there are few: exact, and without a tolerance.
    """
    count = terms.shape[1]
    scale = np.maximum(terms.max(axis=0), np.finfo(float).tiny)
    relative = terms / scale / seconds[:, None]
    best, least = np.zeros(count), float("inf")
    for size in range(1, count + 1):
        for chosen in combinations(range(count), size):
            columns = list(chosen)
            x, *_ = np.linalg.lstsq(relative[:, columns], np.ones(len(seconds)), rcond=None)
            if np.any(x < 0):
                continue
            off = float(np.sum((relative[:, columns] @ x - 1) ** 2))
            if off < least * (1 - 1e-9):
                best, least = np.zeros(count), off
                best[columns] = x
    found: Array = best / scale
    return found
