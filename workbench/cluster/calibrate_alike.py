"""Which ranks' devices are equal, as far as measurements tell.

Ranks measure the same things at the same time: a table of seconds, one row for each rank. How much
longer a rank takes than another is the mean over the table of the logarithms' differences, known
within Student's interval, for all pairs of ranks together. Two devices are apart if even its near
end is more than what is borne, or its middle so much that being equal would have to be proved; and
that in every table: one goes over steps in time, so that a moment in which a rank's processor was
busy with something else counts as chance, one over shapes of layers, so that one odd shape does.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtrit

from workbench.plan.experiment import Experiment
from workbench.train.measure import LayersMeasured, works_on
from workbench.train.repeating import CONFIDENCE

BORNE = 0.05  # relative: less is not worth a curve of its own
UNLIKELY = 1.5  # ratio beyond which devices are taken for unequal, however little is sure
_BLOCKS = 6  # of steps, since neighbouring ones are disturbed by the same
_FEWEST = 3  # columns from which on a table says anything
_NEARLY = 0.01  # relative: of all that a rank computes and moves
_MATTERS = 0.01  # of all seconds: parts that take less need not be known as well

Seconds = NDArray[np.float64]


def classes(tables: Sequence[Seconds]) -> tuple[int, ...]:
    """The class of each rank's device, from 0 on: equal devices have the same one.

    Ranks in the order of their speed are in one class as long as none is apart from another.

    Args:
        tables: positive seconds [ranks, things], the same ones on all ranks.
    """
    ranks = len(tables[0])
    telling = [table for table in tables if table.shape[1] >= _FEWEST]
    if ranks == 1 or not telling:
        return (0,) * ranks
    apart = np.all([_apart(table) for table in telling], axis=0)
    found = np.zeros(ranks, dtype=np.int64)
    members: list[int] = []
    for rank in np.argsort(np.log(telling[0]).mean(axis=1), kind="stable").tolist():
        if apart[rank, members].any():
            members = []
        members.append(rank)
        found[rank] = members[0]
    named: dict[int, int] = {}
    return tuple(named.setdefault(first, len(named)) for first in found.tolist())


def tables_of(found: Sequence[Sequence[LayersMeasured]]) -> list[Seconds]:
    """What ranks with the same to do took: one table over steps, one over parts of a step.

    Args:
        found: of each rank, at each number of rows.
    """
    steps, shapes = [], []
    for column in zip(*found, strict=True):
        parts = np.stack([own.parts for own in column]).astype(np.float64)
        blocks = np.array_split(parts.sum(axis=2), min(_BLOCKS, parts.shape[1]), axis=1)
        steps.append(np.stack([block.mean(axis=1) for block in blocks], axis=1))
        each = parts.mean(axis=1)
        shapes.append(each[:, (each > _MATTERS * each.sum(axis=1, keepdims=True)).all(axis=0)])
    return [np.concatenate(steps, axis=1), np.concatenate(shapes, axis=1)]


def same_work(experiment: Experiment, column: Sequence[LayersMeasured]) -> bool:
    """Whether all ranks had the same to do.

    Args:
        experiment: that was measured.
        column: of each rank, at one number of rows.
    """
    rows, precision = column[0].rows, experiment.precision
    works = (works_on(experiment.plan, rank, rows, precision) for rank in range(len(column)))
    return len({tuple(own) for own in works}) == 1


def as_much_work(experiment: Experiment, column: Sequence[LayersMeasured]) -> bool:
    """Whether ranks had as much to do, nearly: a layer's pieces may differ by an element or so.

    Args:
        experiment: that was measured.
        column: of each rank, at one number of rows.
    """
    totals = []
    for rank, own in enumerate(column):
        works = works_on(experiment.plan, rank, own.rows, experiment.precision).items()
        totals.append([sum(getattr(w, of) * len(n) for w, n in works) for of in ("flops", "bytes")])
    least, most = np.min(totals, axis=0), np.max(totals, axis=0)
    return bool((most <= (1 + _NEARLY) * least).all())


def _apart(table: Seconds) -> NDArray[np.bool_]:
    """[ranks, ranks]: whether two take unequally long."""
    ranks, count = table.shape
    logs = np.log(table)
    mean, covariance = logs.mean(axis=1), np.cov(logs)
    own = np.diag(covariance)
    variance = np.maximum(own[:, None] + own - 2 * covariance, 0.0)
    pairs = ranks * (ranks - 1) / 2
    width = stdtrit(count - 1, 1 - (1 - CONFIDENCE) / 2 / pairs) * np.sqrt(variance / count)
    between = np.abs(mean[:, None] - mean)
    return np.asarray((between - width > -np.log1p(-BORNE)) | (between > np.log(UNLIKELY)))
