"""The cost of a layer's weights: gradient reduction, update and memory."""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from workbench.plan.experiment.experiment import Experiment, Synchronous
from workbench.plan.extension.user_object import Own
from workbench.plan.graph.graph import Layer
from workbench.plan.placement.flow import WeightPlacement
from workbench.plan.placement.placement import group_sizes, replica_groups
from workbench.predict.time.duration import Seconds, Speeds, update_seconds
from workbench.predict.time.pass_events import addition
from workbench.program.buckets import KEEPS_GRADIENT_BYTES, copies, itemsize, piece
from workbench.program.rows import Counts, HostLayout


class WeightCost(NamedTuple):
    """The cost of a layer's weights.

    Attributes:
        summed: the seconds of the reduction of their gradients.
        update: the seconds of the optimizer's update.
        held: the bytes that stay from step to step.
        settled: the bytes of gradients that are alive from the layer's backward pass on.
        added: the seconds to add a further pass's gradients to those of the first.
    """

    summed: float
    update: float
    held: float
    settled: float
    added: float


NO_WEIGHTS = WeightCost(0.0, 0.0, 0.0, 0.0, 0.0)


class WeightCosts:
    """The cost of any layer's weights, the mean over ranks.

    Args:
        experiment: the experiment, for its optimizer, buckets and precision.
        speeds: the devices and links of all ranks.
        weights: the weight of each rank in the mean of times [ranks].
    """

    def __init__(self, experiment: Experiment, speeds: Speeds, weights: Seconds) -> None:
        self.experiment, self.speeds, self.weights = experiment, speeds, weights
        self.world = speeds.ranks.size
        self._of_weights = experiment.sync.timing.of_weights
        self._kept = copies(experiment.optimizer) + (experiment.ema is not None)
        self._shares = {k: self._share(k) for k in group_sizes(self.world)}
        self._rates = {k: self._rate(k) for k in group_sizes(self.world)}

    def of(self, layer: Layer, placed: Mapping[str, WeightPlacement]) -> WeightCost:
        """The cost of the layer's own weights."""
        summed = update = memory = settled = added = 0.0
        if layer.shared:
            return NO_WEIGHTS
        experiment = self.experiment
        synchronous = isinstance(experiment.sync, Synchronous)
        of_weights = self._of_weights
        optimizer = experiment.optimizer
        for index, weight in enumerate(layer.weights):
            where = placed[weight.name]
            size = piece(where, self.world) * itemsize(where, experiment.precision)
            memory += float(size.mean())
            if not weight.trainable:
                continue
            if not synchronous and not of_weights:
                continue  # a server may have all of it
            members = self.world // where.group_size
            if not (isinstance(experiment.sync, Synchronous) and experiment.sync.per_round):
                buckets = members > 1 and not of_weights
                added += self._mean(addition(layer, index, size, buckets, self.speeds))
            owners = members if experiment.shard_optimizer else 1
            memory += float(size.mean()) * self._kept / owners
            held = update_seconds(optimizer, size.astype(np.float64), self.speeds)
            update += self._mean(held) / owners
            if members == 1 or not synchronous:
                rewrites = layer.kind == "linear" and index == 0
                rewrites &= synchronous and not experiment.half
                stays = float((size * ((size >= KEEPS_GRADIENT_BYTES) & rewrites)).mean())
                memory += stays
                settled += float(size.mean()) - stays
                continue
            memory += float((size * (1 + self._shares[where.group_size])).mean())
            summed += self._summed(size, where.group_size)
        return WeightCost(summed, update, memory, settled, added)

    def _summed(self, size: Counts, group_size: int) -> float:
        """The least time that one gradient adds to the all-reduces of its buckets, in seconds.

        A bucket is closed by the gradient that fills it; so it holds less than twice its size
        unless that gradient alone fills it, and then the others in it hold less than that size.
        """
        bucket = self.experiment.sync.bucket_bytes
        latency, rate = self._rates[group_size]
        seconds = latency * np.minimum(size / (2 * bucket), 0.5) + rate * size
        return self._mean(seconds)

    def _rate(self, group_size: int) -> tuple[float, float]:
        """Lower bounds: (seconds of an all-reduce over replicas, seconds for each byte in it).

        With a fused update gradients are only in the reduce-scatter.
        """
        sync = self.experiment.sync
        if not isinstance(sync, Synchronous) or sync.codec or group_size == self.world:
            return 0.0, 0.0
        if isinstance(sync.algorithm, Own):  # its time need not grow evenly with its bytes
            return 0.0, 0.0
        members = range(0, self.world, group_size)
        topology, algorithm = self.speeds.topology(members), sync.algorithm
        beside = not (topology.memory and max(topology.hosts) > 1)
        sizes = [float(2**power) for power in range(10, 33, 2)]
        seconds = [topology.all_reduce(size, algorithm, beside=beside).seconds for size in sizes]
        rate = min(after / size for after, size in zip(seconds, sizes, strict=True))
        latency = min(t - rate * size for t, size in zip(seconds, sizes, strict=True))
        part = 0.5 if self.experiment.fused else 1.0
        return part * max(latency, 0.0), part * rate

    def _share(self, group_size: int) -> Seconds:
        """The fraction of a bucket's sum on each rank, where ranks of a host share it [ranks]."""
        machine = self.speeds.machine
        hosts = HostLayout.of(self.world, machine.ranks_per_host)
        mates = hosts.mates(replica_groups(group_size, self.world))
        return np.where((mates > 1) & (not machine.own_gpus), 1 / mates, 0.0)

    def _mean(self, seconds: Seconds) -> float:
        return float(self.weights @ seconds)
