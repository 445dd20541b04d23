"""Own algorithms and codecs on the engines of a cluster: real sums, against their prediction."""

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from workbench.client.calibration.sum_trace import experiment_for
from workbench.client.engines import Engines
from workbench.client.leases import lent
from workbench.plan.collective.algorithm import Algorithm
from workbench.plan.collective.codec import AnyCodec
from workbench.plan.experiment.experiment import Synchronous
from workbench.plan.extension.extension import Check, name_of
from workbench.predict.traffic.collective_costs import Summing
from workbench.program.rows import HostLayout
from workbench.train.measure.links import RecordedSum

LENGTHS = (1, 1003, 2**16 + 1)
_ITEM_BYTES = 4  # fp32, in which they are summed
_EPS = 2.0**-23


def checks_on(
    cluster: Engines, *, algorithm: Algorithm = "ring", codec: AnyCodec | None = None
) -> list[Check]:
    """Sums on all engines of a cluster, by this algorithm and through this codec.

    Args:
        algorithm: the algorithm; one of your own, or "ring" or "direct".
        codec: the codec; None: values stay as they are, and the sum must be exact.

    Raises:
        ValueError: the algorithm cannot take the codec.
        ClusterError: an engine is not free.
        RunError: a rank failed.
    """
    experiment = experiment_for(len(cluster), algorithm, codec)
    with lent(cluster, experiment.plan, "a check of an all-reduce") as lease:
        shared = {"weights": Path(os.devnull), "lengths": LENGTHS}  # it has no weights
        ranks = lease.call("recorded_sums", experiment, shared)
    sync = experiment.sync
    assert isinstance(sync, Synchronous)
    by = name_of(sync.algorithm) + ("" if sync.codec is None else f", {sync.codec.name}")
    faults = {
        f"{by}: recorded traffic is the predicted one": _recorded(sync, ranks),
        f"{by}: all ranks have the same bits": _unlike(ranks),
    }
    if sync.codec is None:
        faults[f"{by}: the sum is right"] = _wrong(ranks)
    done = f"{len(LENGTHS)} sums on {len(ranks)} ranks"
    return [Check(what, not fault, fault or done) for what, fault in faults.items()]


def _recorded(sync: Synchronous, ranks: Sequence[Sequence[RecordedSum]]) -> str:
    """Where messages, or bytes of a pair of ranks, are not as predicted."""
    world = len(ranks)
    summing, groups = Summing(HostLayout.of(world)), [tuple(range(world))]
    for place, length in enumerate(LENGTHS):
        numel = np.full(world, length, dtype=np.int64)
        said = summing.started(
            numel, groups, _ITEM_BYTES, sync.algorithm, buffer=False, codec=sync.codec
        )
        pairs = np.zeros((world, world), dtype=np.int64)
        for add in said.senders:
            add(pairs, np.ones(world, dtype=np.int64))
        for rank, found in enumerate(own[place] for own in ranks):
            predicted = int(said.messages[rank]), tuple(pairs[rank].tolist())
            if predicted != (found.messages, found.bytes):
                return (
                    f"{length} elements: rank {rank} received {found.messages} messages of "
                    f"{found.bytes} bytes, by sender; predicted were {predicted[0]} of "
                    f"{predicted[1]}"
                )
    return ""


def _unlike(ranks: Sequence[Sequence[RecordedSum]]) -> str:
    for place, length in enumerate(LENGTHS):
        digests = [own[place].digest for own in ranks]
        unlike = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
        if unlike:
            return f"{length} elements: rank {unlike[0]} has other bits than rank 0"
    return ""


def _wrong(ranks: Sequence[Sequence[RecordedSum]]) -> str:
    for place, length in enumerate(LENGTHS):
        most = max(own[place].error for own in ranks)
        if not most <= len(ranks) * _EPS:
            return f"{length} elements: off by {most:.3g} of the magnitudes that were summed"
    return ""
