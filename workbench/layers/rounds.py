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

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.fx
from torch import Tensor

from workbench.layers.context import BatchContext
from workbench.layers.convert import Convert
from workbench.layers.cut_model import CutModel
from workbench.layers.recompute import with_segments
from workbench.plan.placement import Shard
from workbench.plan.tail import Rounds, Tail, round_rows


@dataclass(frozen=True)
class Round:
    """One round of a batch.

    Attributes:
        rows: that each rank of the world brings.
        starts: index of each rank's first row of this round in the global batch.
        begin: where this rank's rows of the round begin among its own.
        last: whether it is the last one.
    """

    rows: tuple[int, ...]
    starts: tuple[int, ...]
    begin: int
    last: bool


def rounds_of(
    rounds: Rounds, rows: tuple[int, ...], first_row: int, group_size: int, rank: int
) -> Iterator[Round]:
    """The rounds of one batch, in their order; the same number on every rank.

    Args:
        rounds: the scheme.
        rows: of the batch on each rank.
        first_row: index of rank 0's first row in the global batch.
        group_size: ranks that gather together.
        rank: this one.
    """
    begun = [0] * len(rows)
    firsts = list(accumulate(rows[:-1], initial=first_row))
    every = round_rows(rounds, rows, group_size)
    for index, brought in enumerate(every):
        starts = tuple(first + at for first, at in zip(firsts, begun, strict=True))
        yield Round(brought, starts, begun[rank], index == len(every) - 1)
        begun = [at + n for at, n in zip(begun, brought, strict=True)]


class PartedModel:
    """The head and the tail of a cut model, which own nothing: their layers are the model's.

    Args:
        model: whose plan has a tail.
        tail: of its plan.
    """

    def __init__(self, model: CutModel, tail: Tail) -> None:
        self.model, self.tail = model, tail
        graph, traced = model.plan.graph, model.traced
        self.per_sample = 1 if tail.boundary == "input" else graph[tail.boundary].rows
        self.learns = tail.boundary in graph.learning
        boundary = _boundary(
            traced.graph, "" if tail.boundary == "input" else graph[tail.boundary].node
        )
        head = torch.fx.GraphModule(traced, _head(traced.graph, boundary), "Head")
        behind = torch.fx.GraphModule(traced, _tail(traced.graph, boundary), "Tail")
        readers = [behind.get_submodule(str(node.target)) for node in _first(behind)]
        self._gathers = [reader for reader in readers if isinstance(reader, Convert)]
        self.compute_head = with_segments(head, model.plan)
        self.compute_tail = with_segments(behind, model.plan)

    def start(self, part: Tensor, brought: Round) -> None:
        """Starts to gather the rows of a round to come."""
        for gather in self._gathers:
            gather.start(part, brought.rows)

    def part(self, x: Tensor, brought: Round, context: BatchContext) -> Tensor:
        """This rank's rows of the round, apart from the head's backward; x is the boundary."""
        c = self.per_sample
        rows = x.detach().narrow(0, brought.begin * c, brought.rows[context.rank] * c)
        return rows.requires_grad_(self.learns)


def joined(parts: list[Tensor], rounds: list[Round], group: range, per_sample: int) -> Tensor:
    """A group's rows as one pass would have them, from the rounds' rows.

    Args:
        parts: for each round, a tensor of the group's rows of it, members in order.
        rounds: the rounds.
        group: the ranks whose rows these are.
        per_sample: rows of the tensor for each row of the batch.
    """
    if len(group) == 1:
        return torch.cat(parts)
    members: list[list[Tensor]] = [[] for _ in group]
    for part, brought in zip(parts, rounds, strict=True):
        sizes = Shard(0, tuple(brought.rows[rank] * per_sample for rank in group)).sizes
        for member, piece in zip(members, part.split_with_sizes(list(sizes)), strict=True):
            member.append(piece)
    return torch.cat([piece for member in members for piece in member])


def _boundary(nodes: torch.fx.Graph, name: str) -> torch.fx.Node:
    """The node of this name; the model's input where there is none."""
    if not name:
        return next(node for node in nodes.nodes if node.op == "placeholder")
    return next(node for node in nodes.nodes if node.name == name)


def _head(nodes: torch.fx.Graph, boundary: torch.fx.Node) -> torch.fx.Graph:
    """What the boundary needs, and the boundary as the only output."""
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
    """The outputs as a function of the boundary; parameters on the way are read here too."""
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
    """The modules that read the input."""
    given = next(node for node in part.graph.nodes if node.op == "placeholder")
    return [node for node in given.users if node.op == "call_module"]


def _above(node: torch.fx.Node, until: torch.fx.Node | None = None) -> set[torch.fx.Node]:
    """A node and all that it is computed from, but nothing beyond `until`."""
    found: set[torch.fx.Node] = set()
    waiting = [node]
    while waiting:
        current = waiting.pop()
        if current not in found:
            found.add(current)
            waiting += [] if current is until else current.all_input_nodes
    return found
