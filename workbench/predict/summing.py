"""What all-reduces bring to each rank, by whoever sums and wherever the ranks are.

    waited for     a layer's own: "auto", in portions of 4 MiB where it is hierarchical
    started        a bucket's: the algorithm that is asked for, all of it at once

Which algorithm "auto" stands for is decided where it is for the ranks that execute it
(`plan/all_reduce.py`); what each one moves is in `collective_costs.py`.
"""

from collections.abc import Callable
from functools import partial

import numpy as np

from workbench.plan.all_reduce import Algorithm, chosen
from workbench.plan.codec import Codec
from workbench.predict.collective_costs import FLAT, Costs, direct, hierarchical, ring
from workbench.predict.hosts import Groups, Hosts
from workbench.predict.received import Received
from workbench.predict.rows import Counts

PORTION_BYTES = 2**22
# Portions of one sum: no more than this, however large they get.
MOST_PORTIONS = 1024
_WIDE = 4

# Of (elements, bytes of one, ranks on each host of the group): of each rank of the group.
_Cost = Callable[[int, int, tuple[int, ...]], Costs]


class Summing:
    """All-reduces on ranks that lie on these hosts, without GPUs."""

    def __init__(self, hosts: Hosts) -> None:
        self.hosts = hosts
        self._known: dict[tuple[object, ...], Costs] = {}

    def waited_for(self, numel: Counts, groups: Groups, itemsize: int) -> Received:
        """Of so many elements, which are the same on all ranks of a group."""
        return self._received(numel, groups, itemsize, _waited_for)

    def started(
        self,
        numel: Counts,
        groups: Groups,
        itemsize: int,
        algorithm: Algorithm,
        *,
        buffer: bool,
        codec: Codec | None = None,
    ) -> Received:
        """The same.

        Args:
            numel: elements.
            groups: which sum.
            itemsize: bytes of an element.
            algorithm: as asked for.
            buffer: whether what is summed lies in memory made for it, shared where ranks share.
            codec: of what travels.
        """
        cost = partial(_started, algorithm, buffer, codec)
        return self._received(numel, groups, itemsize, cost, (algorithm, buffer, codec))

    def _received(
        self, numel: Counts, groups: Groups, itemsize: int, cost: _Cost, key: object = None
    ) -> Received:
        messages, received = np.zeros_like(numel), np.zeros_like(numel)
        members = np.asarray(groups)
        alike: dict[tuple[int, tuple[int, ...]], list[int]] = {}
        lengths = numel[members[:, 0]].tolist()
        for index, found in enumerate(zip(lengths, self.hosts.over(groups), strict=True)):
            alike.setdefault(found, []).append(index)
        for (length, hosts), which in alike.items():
            name = key, length, itemsize, hosts
            if name not in self._known:
                self._known[name] = cost(length, itemsize, hosts)
            costs = self._known[name]
            messages[members[which]] = costs.messages
            received[members[which]] = costs.bytes
        return Received(messages, received)


def _waited_for(length: int, itemsize: int, hosts: tuple[int, ...]) -> Costs:
    nbytes = length * itemsize
    name = chosen("auto", hosts, "gloo", nbytes, beside=False)
    if name != "hierarchical":
        return _flat(name, length, itemsize, sum(hosts))
    portion = max(1, PORTION_BYTES // itemsize, -(-length // MOST_PORTIONS))
    full, rest = divmod(length, portion)
    costs = hierarchical(rest, itemsize, hosts).both
    return costs + hierarchical(portion, itemsize, hosts).both.times(full)


def _started(
    algorithm: Algorithm,
    buffer: bool,
    codec: Codec | None,
    length: int,
    itemsize: int,
    hosts: tuple[int, ...],
) -> Costs:
    name = started_as(algorithm, buffer, codec, length * itemsize, hosts)
    if name == "hierarchical":
        return hierarchical(length, itemsize, hosts, codec).both
    return _flat(name, length, itemsize, sum(hosts), codec)


def started_as(
    algorithm: Algorithm, buffer: bool, codec: Codec | None, nbytes: int, hosts: tuple[int, ...]
) -> Algorithm:
    """The algorithm that a group of ranks on these hosts then takes."""
    beside = not buffer or len(hosts) == sum(hosts)  # where nobody shares, nor do buffers
    coded = "" if codec is None else codec.name
    return chosen(algorithm, hosts, "gloo", nbytes, beside=beside, codec=coded)


def _flat(
    name: Algorithm, length: int, itemsize: int, ranks: int, codec: Codec | None = None
) -> Costs:
    """The backend does not tell what it sends: recorded is what it comes to, in no half type."""
    if name == "backend":
        return direct(length, max(itemsize, _WIDE), ranks)
    if codec is not None:
        return (ring if name == "ring" else direct)(length, itemsize, ranks, codec)
    return FLAT[name](length, itemsize, ranks)
