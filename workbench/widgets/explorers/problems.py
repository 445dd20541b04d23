"""Losses to descend: a quadratic one whose curvatures are known, and the recognition of digits.

Both are split over workers, whose gradients add up to the loss's own.
"""

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Name = Literal["quadratic", "digits"]
WORKERS = 4
_ROWS, _LENGTH = 24, 64  # of the quadratic loss: of each worker, and values
_CLASSES, _PIXELS, _BATCH = 10, 64, 32


@dataclass(frozen=True)
class Goal:
    """Where a descent is said to have arrived.

    Attributes:
        loss: relative to the first.
        words: for people: "a thousandth".
        short: in a table's head: "1/1000".
    """

    loss: float
    words: str
    short: str


GOALS: Mapping[Name, Goal] = {
    "quadratic": Goal(1e-3, "a thousandth", "1/1000"),
    "digits": Goal(0.2, "a fifth", "1/5"),
}


class Problem(Protocol):
    """A loss, and the gradients of its workers.

    Attributes:
        start: the values before the first step.
        curvature: the largest one there, in whose inverse a learning rate is given.
    """

    start: Array
    curvature: float

    def loss(self, values: Array) -> float:
        """At some values."""

    def gradients(self, values: Array, step: int) -> NDArray[np.float32]:
        """[workers, values], whose sum is the gradient of a step."""


class Quadratic:
    """Linear regression without noise, where each worker has rows X[r] of a matrix.

        f(w) = 1/2 sum_r |X[r] (w - w*)|^2,     gradient of worker r: X[r]^T X[r] (w - w*)

    Its curvatures, the eigenvalues of X^T X, are 1 = h[1] > ... > h[n] = 1/condition, evenly
    spaced on a logarithmic scale. Values are w - w*.

    Args:
        condition: the largest curvature over the smallest.
    """

    curvature = 1.0

    def __init__(self, condition: float) -> None:
        generator = np.random.default_rng(0)
        curvatures = np.geomspace(1.0, 1.0 / condition, _LENGTH)
        left = np.linalg.qr(generator.standard_normal((WORKERS * _ROWS, _LENGTH)))[0]
        right = np.linalg.qr(generator.standard_normal((_LENGTH, _LENGTH)))[0]
        rows = (left * np.sqrt(curvatures)) @ right.T
        self.rows = rows.reshape(WORKERS, _ROWS, _LENGTH)
        # As much in every direction, so that each curvature matters.
        self.start = right @ np.ones(_LENGTH)

    def loss(self, values: Array) -> float:
        """At a distance from the least one."""
        return float(((self.rows @ values) ** 2).sum() / 2)

    def gradients(self, values: Array, step: int) -> NDArray[np.float32]:
        """Of all rows, in every step."""
        missed = self.rows @ values
        return np.matmul(missed[:, None, :], self.rows)[:, 0, :].astype(np.float32)


class Digits:
    """Softmax regression of scikit-learn's 1,797 images of handwritten digits, 8x8 grey.

    Every fifth image is kept for the loss and the share of digits that are recognised; of the
    others, each worker takes 32 in every step, in one order, again and again. The mean loss of a
    step's images over all classes c has, where all weights are zero, the curvatures

        (I/10 - 1/100) (x) E[x x^T],    of which the largest is that of E[x x^T] / 10

    and others later on: there, what is stable by a quadratic loss is a guide.
    """

    def __init__(self) -> None:
        pixels, labels = _images()
        kept = np.arange(len(labels)) % 5 == 4
        self._test, self._expected = pixels[kept], labels[kept]
        order = np.random.default_rng(0).permutation(np.flatnonzero(~kept))
        self._train, self._labels = pixels[order], labels[order]
        moments = self._train.T @ self._train / len(order)
        self.curvature = float(np.linalg.eigvalsh(moments)[-1]) / _CLASSES
        self.start = np.zeros(_PIXELS * _CLASSES)

    def loss(self, values: Array) -> float:
        """The mean cross entropy of the images that are not learnt from."""
        scores = self._scores(values)
        highest = scores.max(axis=1)
        whole = highest + np.log(np.exp(scores - highest[:, None]).sum(axis=1))
        return float((whole - scores[np.arange(len(scores)), self._expected]).mean())

    def recognised(self, values: Array) -> float:
        """The share of these images whose digit gets the highest score."""
        return float((self._scores(values).argmax(axis=1) == self._expected).mean())

    def gradients(self, values: Array, step: int) -> NDArray[np.float32]:
        """Of the mean loss of the step's images."""
        count = WORKERS * _BATCH
        places = np.arange(step * count, (step + 1) * count) % len(self._labels)
        images = self._train[places]
        scores = images @ values.reshape(_PIXELS, _CLASSES)
        shares = np.exp(scores - scores.max(axis=1, keepdims=True))
        shares /= shares.sum(axis=1, keepdims=True)
        shares[np.arange(count), self._labels[places]] -= 1
        mine = images.reshape(WORKERS, _BATCH, _PIXELS), shares.reshape(WORKERS, _BATCH, _CLASSES)
        found = np.matmul(mine[0].transpose(0, 2, 1), mine[1]) / count
        return found.reshape(WORKERS, -1).astype(np.float32)

    def _scores(self, values: Array) -> Array:
        return self._test @ values.reshape(_PIXELS, _CLASSES)


@lru_cache(maxsize=8)
def problem(name: Name, condition: float) -> Quadratic | Digits:
    """One of them; `condition` is that of the quadratic loss."""
    return Quadratic(condition) if name == "quadratic" else Digits()


def _images() -> tuple[Array, NDArray[np.int64]]:
    """Pixels from 0 to 1, [images, 64], and their digits.

    Raises:
        ValueError: scikit-learn is not installed.
    """
    # The file itself, because importing `sklearn.datasets` takes a second and 100 MB.
    package = importlib.util.find_spec("sklearn")
    if package is None or package.origin is None:
        raise ValueError("the digits come with scikit-learn: pip install scikit-learn")
    path = Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz"
    table = np.loadtxt(path, delimiter=",", dtype=np.int64)
    pixels = table[:, :-1] / 16
    pixels[:, 0] = 1.0  # black in every image; as one, its weights are the bias
    return pixels, table[:, -1]
