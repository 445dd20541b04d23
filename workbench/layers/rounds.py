"""A cut model parted at its gather: the head runs once, the tail in rounds.

    head      images -> boundary            own rows, once
    for each round
      start   boundary[next round]          gathers the next round's rows meanwhile
      tail    boundary[round] -> outputs    takes the round's rows, then computes
              loss, backward                the gather's dual returns each row's gradient
                                            to its owner
    head's backward, once, with the gradients of all rounds in their places

Weight gradients of the tail add up over the rounds. What a round's forward has kept for its
backward is gone before the next round begins.

Source: schemes (b) and (c) of One Weird Trick (arXiv:1404.5997, sec. 4).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.fx
from torch import Tensor

from workbench.layers.cut_model import CutModel, input_node
from workbench.layers.local.context import BatchContext
from workbench.layers.local.convert import ConvertLayout
from workbench.layers.recompute import with_segments
from workbench.plan.graph.graph import Graph
from workbench.plan.placement.placement import Shard
from workbench.plan.placement.rounds import Tail


@dataclass(frozen=True)
class TailRound:
    """One round of a batch.

    Attributes:
        rows: the rows that each rank of the world brings.
        starts: the index of each rank's first row of this round in the global batch.
        begin: the index of this rank's first row of the round among its own rows.
        last: whether it is the last round.
    """

    rows: tuple[int, ...]
    starts: tuple[int, ...]
    begin: int
    last: bool


def rounds_of(every: Sequence[tuple[int, ...]], first_row: int, rank: int) -> Iterator[TailRound]:
    """The rounds of one batch, in their order; the same number on every rank."""
    rows = [sum(brought) for brought in zip(*every, strict=True)]
    begun = [0] * len(rows)
    firsts = list(accumulate(rows[:-1], initial=first_row))
    for index, brought in enumerate(every):
        starts = tuple(first + at for first, at in zip(firsts, begun, strict=True))
        yield TailRound(brought, starts, begun[rank], index == len(every) - 1)
        begun = [at + n for at, n in zip(begun, brought, strict=True)]


class PartedModel:
    """The head and the tail of a cut model, which own nothing: their layers are the model's.

    Attributes:
        compute_head: the head: all inputs [rows, ...] to the boundary.
    """

    def __init__(self, model: CutModel, tail: Tail) -> None:
        self.model, self.tail = model, tail
        graph, traced = model.plan.graph, model.traced
        self.per_sample = graph.rows_of(tail.boundary)
        self.learns = tail.boundary in graph.learning
        boundary = _boundary(traced.graph, graph, tail.boundary)
        head = torch.fx.GraphModule(traced, _head(traced.graph, boundary), "Head")
        behind = torch.fx.GraphModule(traced, _tail(traced.graph, boundary), "Tail")
        readers = [behind.get_submodule(str(node.target)) for node in _first(behind)]
        self._gathers = [reader for reader in readers if isinstance(reader, ConvertLayout)]
        self.compute_head = with_segments(head, model.plan)
        self.compute_tail = with_segments(behind, model.plan)

    def start(self, part: Tensor, brought: TailRound) -> None:
        """Starts to gather the rows of a round to come.

        Args:
            part: this rank's rows of the boundary in that round [rows, ...].
        """
        for gather in self._gathers:
            gather.start(part, brought.rows)

    def part(self, x: Tensor, brought: TailRound, context: BatchContext) -> Tensor:
        """Returns this rank's rows of a round, cut off from the head's backward pass.

        Args:
            x: the boundary [own rows, ...].
        """
        c = self.per_sample
        rows = x.detach().narrow(0, brought.begin * c, brought.rows[context.rank] * c)
        return rows.requires_grad_(self.learns)


def joined(parts: list[Tensor], rounds: list[TailRound], group: range, per_sample: int) -> Tensor:
    """Returns a group's rows [rows, ...] as one pass would have them, from the rounds' rows.

    Args:
        parts: the group's rows of each round [rows, ...], members in order.
    """
    if len(group) == 1:
        return torch.cat(parts)
    members: list[list[Tensor]] = [[] for _ in group]
    for part, brought in zip(parts, rounds, strict=True):
        sizes = Shard(0, tuple(brought.rows[rank] * per_sample for rank in group)).sizes
        for member, piece in zip(members, part.split_with_sizes(list(sizes)), strict=True):
            member.append(piece)
    return torch.cat([piece for member in members for piece in member])


def _boundary(nodes: torch.fx.Graph, graph: Graph, name: str) -> torch.fx.Node:
    """Returns the node of a layer or of an input."""
    if name in graph.sources:
        return input_node(nodes, graph, name)
    node = next(node for node in nodes.nodes if node.name == graph[name].node)
    # What brings a result to its type is no layer, and reads also what is before it.
    others = {layer.node for layer in graph.layers}
    typed = (each for each in node.users if each.target == "type_as" and each.name not in others)
    return next(typed, node)


def _head(nodes: torch.fx.Graph, boundary: torch.fx.Node) -> torch.fx.Graph:
    """Returns the graph of what the boundary needs, with the boundary as the only output."""
    needed = _above(boundary)
    part = torch.fx.Graph()
    copies: dict[torch.fx.Node, torch.fx.Node] = {}
    for node in nodes.nodes:
        if node in needed or node.op == "placeholder":
            copies[node] = part.node_copy(node, copies.__getitem__)
    part.output(copies[boundary])
    part.lint()
    return part


def _tail(nodes: torch.fx.Graph, boundary: torch.fx.Node) -> torch.fx.Graph:
    """Returns the graph of the outputs as a function of the boundary, with its parameters."""
    output = next(node for node in nodes.nodes if node.op == "output")
    needed = _above(output, until=boundary)
    part = torch.fx.Graph()
    copies = {boundary: part.placeholder("boundary")}
    for node in nodes.nodes:
        if node in needed and node is not boundary:
            copies[node] = part.node_copy(node, copies.__getitem__)
    part.lint()
    return part


def _first(part: torch.fx.GraphModule) -> list[torch.fx.Node]:
    """Returns the calls of modules that read the input."""
    read = next(node for node in part.graph.nodes if node.op == "placeholder")
    return [node for node in read.users if node.op == "call_module"]


def _above(node: torch.fx.Node, until: torch.fx.Node | None = None) -> set[torch.fx.Node]:
    """Returns a node and all that it is computed from, but nothing beyond `until`."""
    found: set[torch.fx.Node] = set()
    waiting = [node]
    while waiting:
        current = waiting.pop()
        if current not in found:
            found.add(current)
            waiting += [] if current is until else current.all_input_nodes
    return found
