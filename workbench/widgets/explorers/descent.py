"""Late and coarse gradients on losses so small that every step is really computed.

Steps are those of `Pipelined`: with S[t] the gradient at w[t], summed over workers,

    v <- m v + S[t - (width - 1)],     w <- w - lr v,     nothing while t < width - 1

where lr is in units of the inverse of the largest curvature at the beginning: on a quadratic loss,
`stability.limit` is its limit. The other loss is that of recognising digits; both
are split over workers, whose gradients add up to the loss's own. Codecs give here what those of
`workbench.comm.codecs` give on tensors that travel.
"""

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from workbench.plan.collective.codec import Codec

Floats = NDArray[np.float32]


def coded(pieces: Floats, codec: Codec) -> Floats:
    """What is decoded of pieces [pieces, values], each of which was encoded by itself."""
    rounded: dict[str, Callable[[Floats], Floats]] = {
        "fp16": lambda x: x.astype(np.float16).astype(np.float32),
        "bf16": _bf16,
        "bf16_truncated": lambda x: (x.view(np.uint32) & 0xFFFF0000).view(np.float32),
        "int8": partial(_multiples, most=127, chunk=codec.chunk),
        "int4": partial(_multiples, most=7, chunk=codec.chunk),
        "top_k": partial(_largest, kept=codec.kept(pieces.shape[1])),
    }
    return rounded[codec.name](np.ascontiguousarray(pieces, dtype=np.float32))


class Sum:
    """All-reduces of workers' gradients by "direct", whose pieces go through a codec.

    The owner of a segment adds its own part as it is to those that it decodes, and encodes the
    sum for all, itself included; a codec with error feedback gets what was left out the next time.

    Args:
        codec: the codec; None: nothing is lost.
        workers: number of workers who sum.
        length: number of values of a gradient; a multiple of `workers`.
    """

    def __init__(self, codec: Codec | None, workers: int, length: int) -> None:
        self._codec, self._workers = codec, workers
        self._segments = (workers, workers, length // workers)
        self._residuals = np.zeros(self._segments, dtype=np.float32)  # [worker, segment, values]

    def __call__(self, gradients: Floats) -> Floats:
        """The sum over workers, of [workers, length], as all of them have it."""
        if self._codec is None or self._workers == 1:
            return gradients.sum(axis=0)
        own = np.arange(self._workers)
        parts = gradients.reshape(self._segments)
        given = parts + self._residuals
        sent = coded(given.reshape(-1, given.shape[2]), self._codec).reshape(self._segments)
        sent[own, own] = parts[own, own]
        total = sent.sum(axis=0) + self._residuals[own, own]
        found = coded(total, self._codec)
        if self._codec.error_feedback:
            self._residuals = given - sent
            self._residuals[own, own] = total - found
        return found.reshape(-1)


def _bf16(x: Floats) -> Floats:
    """The nearest value, of two the even one."""
    bits = x.view(np.uint32)
    rounded = bits + 0x7FFF + ((bits >> 16) & 1)
    return (rounded & 0xFFFF0000).astype(np.uint32).view(np.float32)


def _multiples(x: Floats, most: int, chunk: int) -> Floats:
    found = np.empty_like(x)
    for start in range(0, x.shape[1], chunk):
        part = x[:, start : start + chunk]
        scale = np.abs(part).max(axis=1, keepdims=True) / np.float32(most)
        inverse = np.divide(np.float32(1), scale, out=np.zeros_like(scale), where=scale > 0)
        found[:, start : start + chunk] = np.rint(part * inverse) * scale
    return found


def _largest(x: Floats, kept: int) -> Floats:
    found = np.zeros_like(x)
    places = np.argpartition(-np.abs(x), kept - 1, axis=1)[:, :kept]
    np.put_along_axis(found, places, np.take_along_axis(x, places, axis=1), axis=1)
    return found


Array = NDArray[np.float64]
Name = Literal["quadratic", "digits"]
WORKERS = 4
_ROWS, _LENGTH = 24, 64  # of the quadratic loss: of each worker, and values
_CLASSES, _PIXELS, _BATCH = 10, 64, 32


@dataclass(frozen=True)
class Goal:
    """Where a descent is said to have arrived.

    Attributes:
        loss: the loss relative to the first.
        words: the same for people: "a thousandth".
        short: the same in a table's head: "1/1000".
    """

    loss: float
    words: str
    short: str


GOALS: Mapping[Name, Goal] = {
    "quadratic": Goal(1e-3, "a thousandth", "1/1000"),
    "digits": Goal(0.2, "a fifth", "1/5"),
}


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


# Of the loss at the beginning: beyond these it is computed no more.
DIVERGED, REACHED = 1e3, 1e-7


@dataclass(frozen=True)
class Descent:
    """One run.

    Attributes:
        lr: learning rate times the largest curvature at the beginning.
        width: width of the pipeline; 1 is synchronous.
        momentum: momentum of SGD.
        codec: the codec that gradients go through, or None.
        condition: the largest curvature of the quadratic loss over the smallest.
        problem: name of the loss.
        steps: number of steps.
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
