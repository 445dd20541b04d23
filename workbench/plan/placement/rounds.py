"""The tail of a network: the layers after its one gather of rows, which can run in rounds.

    head    every rank its own rows, once a step
    gather  the members of a shard group give their rows to the whole group
    tail    all that follows; in rounds it sees a part of the group's rows at a time

    rounds   scheme   round t of a group of k has               rounds
    BK       (a)      all rows of all members                    1
    B        (b)      all rows of member t                       k
    B/K      (c)      the t-th of k parts of every member's      k

Source: schemes (a), (b), (c) of One Weird Trick (arXiv:1404.5997, sec. 4); the names are those
of SplitBrain (arXiv:2112.15317).
"""

from collections.abc import Set
from dataclasses import dataclass, replace
from typing import Literal

from workbench.plan.graph.graph import Graph, Layer
from workbench.plan.io.errors import PlanError
from workbench.plan.placement.flow import Flow
from workbench.plan.placement.placement import ROWS, apportion

Rounds = Literal["BK", "B", "B/K"]
ROUNDS: tuple[Rounds, ...] = ("BK", "B", "B/K")

VALID = "valid are rounds 'BK', or a plan with one gather of rows and only its readers behind it"


class RoundsError(PlanError):
    """A plan whose sharded layers cannot run in rounds; the text names the layer in the way."""


@dataclass(frozen=True)
class Tail:
    """The division of a network into head and tail.

    Attributes:
        boundary: the last layer of the head (or an input), whose rows the group gathers.
        layers: the names of all layers after the boundary, and of parameters that these read.
    """

    boundary: str
    group_size: int
    layers: frozenset[str]


def tail_of(graph: Graph, flow: Flow) -> Tail | None:
    """The tail of a model under a flow; None where nothing is gathered."""
    entries = [
        (producer, reader.name, step)
        for reader in graph.layers
        for producer in dict.fromkeys(reader.inputs)
        for step in flow.edges[producer, reader.name]
        if step.source == ROWS != step.target
    ]
    if not entries:
        return None
    boundary, first, gather = entries[0]
    for producer, reader, step in entries:
        if producer == boundary and step.group_size == gather.group_size:
            continue
        over = "" if step.group_size == gather.group_size else f" over {step.group_size} ranks"
        raise _refusal(
            f"layer {reader!r} gathers rows of {producer!r}{over} after layer {first!r} has "
            f"gathered those of {boundary!r} over {gather.group_size}"
        )
    tail = Tail(boundary, gather.group_size, _behind(graph, boundary))
    before = frozenset(graph.sources).union(*(_behind(graph, name) for name in graph.sources))
    _check(graph, tail, before)
    return replace(tail, layers=tail.layers | _read_by(graph, tail, before))


def round_rows(rounds: Rounds, rows: tuple[int, ...], group_size: int) -> list[tuple[int, ...]]:
    """The rows that each rank of the world contributes in each round [rounds, ranks].

    A rank's rows keep their order. Where k does not divide them, the first rounds of "B/K" have one
    row more than the last.
    """
    k = group_size
    match rounds:
        case "BK":
            return [rows]
        case "B":
            return [
                tuple(n if rank % k == t else 0 for rank, n in enumerate(rows)) for t in range(k)
            ]
        case "B/K":
            parts = [apportion(n, (1,) * k) for n in rows]
            return [tuple(part[t] for part in parts) for t in range(k)]


def _behind(graph: Graph, boundary: str) -> frozenset[str]:
    """All layers that depend on the output of `boundary`."""
    found: set[str] = set()
    waiting = [boundary]
    while waiting:
        readers = set(graph.consumers[waiting.pop()]) - found
        found |= readers
        waiting += readers
    return frozenset(found)


def _read_by(graph: Graph, tail: Tail, before: Set[str]) -> frozenset[str]:
    """Parameters, and what is computed from them alone, that only the tail reads."""
    found: set[str] = set()
    for layer in reversed(graph.layers):
        readers = set(graph.consumers[layer.name])
        if layer.name in before or layer.name in tail.layers:
            continue
        behind = readers & (tail.layers | found)
        if behind and readers - behind:
            raise _refusal(
                f"layer {layer.name!r} is read by {min(behind)!r} behind the gather of "
                f"{tail.boundary!r} and by {min(readers - behind)!r} before it"
            )
        if behind:
            found.add(layer.name)
    return frozenset(found)


def _check(graph: Graph, tail: Tail, before: Set[str]) -> None:
    """Checks that head and tail meet only at the gather, and that the tail mixes no rows."""
    gathered = f"behind the gather of {tail.boundary!r}"
    for layer in graph.layers:
        behind = layer.name in tail.layers
        if layer.shared and behind != (layer.shared in tail.layers):
            raise _refusal(
                f"layer {layer.name!r} shares its weights with {layer.shared!r}, and only one of "
                f"them is {gathered}"
            )
        if not behind:
            continue
        for name in layer.inputs:
            if name != tail.boundary and name in before and name not in tail.layers:
                raise _refusal(f"layer {layer.name!r} is {gathered} and also reads {name!r}")
        if mixes_rows(layer):
            raise _refusal(
                f"layer {layer.name!r} ({layer.kind}) is {gathered}, and a round would give it "
                f"the statistics of a part of the rows"
            )
    for name in graph.outputs:
        if name not in tail.layers:
            raise _refusal(f"the model also returns {name!r}, which is not {gathered}")


def mixes_rows(layer: Layer) -> bool:
    """Whether a layer's output for one row depends on the others."""
    return layer.of_batch or ("BatchNorm" in layer.target and not layer.evaluating)


def _refusal(why: str) -> RoundsError:
    return RoundsError(f"the sharded layers cannot run in rounds: {why}; {VALID}")
