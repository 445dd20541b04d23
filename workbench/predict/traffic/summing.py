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
from workbench.predict.traffic.collective_costs import FLAT, Costs, direct, hierarchical, ring
from workbench.predict.traffic.givers import Giver, Part, add_summed
from workbench.predict.traffic.received import Received
from workbench.program.hosts import Groups, Hosts
from workbench.program.rows import Counts

PORTION_BYTES = 2**22
# Portions of one sum: no more than this, however large they get.
MOST_PORTIONS = 1024
_WIDE = 4

# Of (elements, bytes of one, ranks on each host of the group): what they come to.
_Parts = Callable[[int, int, tuple[int, ...]], tuple[Part, ...]]


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
        parts = partial(_started, algorithm, buffer, codec)
        return self._received(numel, groups, itemsize, parts, (algorithm, buffer, codec))

    def _received(
        self, numel: Counts, groups: Groups, itemsize: int, parts: _Parts, key: object = None
    ) -> Received:
        messages, received = np.zeros_like(numel), np.zeros_like(numel)
        members = np.asarray(groups)
        alike: dict[tuple[int, tuple[int, ...]], list[int]] = {}
        lengths = numel[members[:, 0]].tolist()
        for index, found in enumerate(zip(lengths, self.hosts.over(groups), strict=True)):
            alike.setdefault(found, []).append(index)
        givers: list[Giver] = []
        for (length, hosts), which in alike.items():
            name = key, length, itemsize, hosts
            summed = parts(length, itemsize, hosts)
            if name not in self._known:
                self._known[name] = _costs(summed, hosts)
            costs = self._known[name]
            messages[members[which]] = costs.messages
            received[members[which]] = costs.bytes
            givers.append(partial(add_summed, summed, hosts, members[which]))
        return Received(messages, received, tuple(givers))


def _waited_for(length: int, itemsize: int, hosts: tuple[int, ...]) -> tuple[Part, ...]:
    nbytes = length * itemsize
    name = chosen("auto", hosts, "gloo", nbytes, beside=False)
    if name != "hierarchical":
        return (_part(name, length, itemsize),)
    portion = max(1, PORTION_BYTES // itemsize, -(-length // MOST_PORTIONS))
    full, rest = divmod(length, portion)
    return _part(name, rest, itemsize), _part(name, portion, itemsize, times=full)


def _started(
    algorithm: Algorithm,
    buffer: bool,
    codec: Codec | None,
    length: int,
    itemsize: int,
    hosts: tuple[int, ...],
) -> tuple[Part, ...]:
    name = started_as(algorithm, buffer, codec, length * itemsize, hosts)
    return (_part(name, length, itemsize, codec),)


def started_as(
    algorithm: Algorithm, buffer: bool, codec: Codec | None, nbytes: int, hosts: tuple[int, ...]
) -> Algorithm:
    """The algorithm that a group of ranks on these hosts then takes."""
    beside = not buffer or len(hosts) == sum(hosts)  # where nobody shares, nor do buffers
    coded = "" if codec is None else codec.name
    return chosen(algorithm, hosts, "gloo", nbytes, beside=beside, codec=coded)


def _part(
    name: Algorithm, length: int, itemsize: int, codec: Codec | None = None, times: int = 1
) -> Part:
    """The backend does not tell what it sends: recorded is what it comes to, in no half type."""
    if name == "backend":
        return Part("direct", length, max(itemsize, _WIDE), None, times)
    return Part(name, length, itemsize, codec, times)


def _costs(parts: tuple[Part, ...], hosts: tuple[int, ...]) -> Costs:
    found = Costs.none(sum(hosts))
    for name, length, itemsize, codec, times in parts:
        if name == "hierarchical":
            costs = hierarchical(length, itemsize, hosts, codec).both
        elif codec is not None:
            costs = (ring if name == "ring" else direct)(length, itemsize, sum(hosts), codec)
        else:
            costs = FLAT[name](length, itemsize, sum(hosts))
        found = found + costs.times(times)
    return found
