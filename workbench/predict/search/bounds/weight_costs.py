"""What the weights of a layer cost: the sums of their gradients, their update, and their memory."""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from workbench.plan.experiment import Experiment, LocalSGD, Synchronous
from workbench.plan.graph import Layer
from workbench.plan.mesh import group_sizes, replica_groups
from workbench.plan.weights import WeightPlacement
from workbench.predict.time.adding import addition
from workbench.predict.time.duration import Seconds, Speeds, update_seconds
from workbench.program.hosts import Hosts
from workbench.program.parameters import KEEPS_GRADIENT_BYTES, copies, itemsize, piece
from workbench.program.rows import Counts


class WeightCost(NamedTuple):
    """What the weights of a layer cost.

    Attributes:
        summed: seconds of the sums of their gradients.
        update: seconds of the optimizer.
        held: bytes that stay.
        settled: bytes of gradients that are there from the layer's backward pass on.
        added: seconds to add a further pass's gradients to those of the first.
    """

    summed: float
    update: float
    held: float
    settled: float
    added: float


class WeightCosts:
    """Of any layer's weights, on average over ranks.

    Args:
        experiment: decides on optimizer, buckets and precision.
        speeds: the speeds of all ranks.
        weights: weight of each rank in the mean of times [ranks].
    """

    def __init__(self, experiment: Experiment, speeds: Speeds, weights: Seconds) -> None:
        self.experiment, self.speeds, self.weights = experiment, speeds, weights
        self.world = speeds.ranks.size
        self._shares = {k: self._share(k) for k in group_sizes(self.world)}
        self._rates = {k: self._rate(k) for k in group_sizes(self.world)}

    def of(self, layer: Layer, placed: Mapping[str, WeightPlacement]) -> WeightCost:
        """Of the layer's own weights."""
        summed = update = memory = settled = added = 0.0
        if layer.shared:
            return WeightCost(summed, update, memory, settled, added)
        experiment = self.experiment
        synchronous = isinstance(experiment.sync, Synchronous)
        optimizer = experiment.optimizer
        for index, weight in enumerate(layer.weights):
            where = placed[weight.name]
            size = piece(where, self.world) * itemsize(where, experiment.precision)
            memory += float(size.mean())
            if not weight.trainable:
                continue
            if not isinstance(experiment.sync, Synchronous | LocalSGD):
                continue  # a server may have all of it
            members = self.world // where.group_size
            if not (isinstance(experiment.sync, Synchronous) and experiment.sync.per_round):
                buckets = members > 1 and not isinstance(experiment.sync, LocalSGD)
                added += self._mean(addition(layer, index, size, buckets, self.speeds))
            owners = members if experiment.shard_optimizer else 1
            memory += float(size.mean()) * copies(optimizer) / owners
            held = update_seconds(
                optimizer.kind, size.astype(np.float64), copies(optimizer), self.speeds
            )
            update += self._mean(held) / owners
            if members == 1 or not synchronous:
                rewrites = layer.kind == "linear" and index == 0
                rewrites &= synchronous and experiment.precision != "bf16"
                stays = float((size * ((size >= KEEPS_GRADIENT_BYTES) & rewrites)).mean())
                memory += stays
                settled += float(size.mean()) - stays
                continue
            memory += float((size * (1 + self._shares[where.group_size])).mean())
            summed += self._summed(size, where.group_size)
        return WeightCost(summed, update, memory, settled, added)

    def _summed(self, size: Counts, group_size: int) -> float:
        """At least what one gradient adds to the all-reduces of its buckets.

        A bucket is closed by the gradient with which it holds enough; so it has less than twice
        as much unless that one alone is enough, and then the others in it have less than that.
        """
        bucket = self.experiment.sync.bucket_bytes
        latency, rate = self._rates[group_size]
        seconds = latency * np.minimum(size / (2 * bucket), 0.5) + rate * size
        return self._mean(seconds)

    def _rate(self, group_size: int) -> tuple[float, float]:
        """(seconds of an all-reduce among replicas, seconds for each byte in it), at least.

        With a fused update gradients are in the first half of one.
        """
        sync = self.experiment.sync
        if not isinstance(sync, Synchronous) or sync.codec or group_size == self.world:
            return 0.0, 0.0
        members = range(0, self.world, group_size)
        meeting, algorithm = self.speeds.meeting(members), sync.algorithm
        beside = not (meeting.memory and max(meeting.hosts) > 1)
        sizes = [float(2**power) for power in range(10, 33, 2)]
        seconds = [meeting.all_reduce(size, algorithm, beside=beside).seconds for size in sizes]
        rate = min(after / size for after, size in zip(seconds, sizes, strict=True))
        latency = min(t - rate * size for t, size in zip(seconds, sizes, strict=True))
        part = 0.5 if self.experiment.fused else 1.0
        return part * max(latency, 0.0), part * rate

    def _share(self, group_size: int) -> Seconds:
        """Of a bucket's sum, what lies with each rank where ranks of one host share it."""
        hosts = Hosts.of(self.world, self.speeds.machine.ranks_per_host)
        mates = hosts.mates(replica_groups(group_size, self.world))
        return np.where(mates > 1, 1 / mates, 0.0)

    def _mean(self, seconds: Seconds) -> float:
        return float(self.weights @ seconds)
