"""Decisions on the size of the batch that come out the same for every batch of a run.

One process decides on the batch of a whole step, and ranks have few rows of it, or none. So a
decision that is the same for all batches from two samples on may be recorded as it was made; where
it is another one for a single sample, a run with such a batch is refused.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Node
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from workbench.model.tracing.batch import called, shape_for, tensors

_TRIED = (*range(2, 66), 100, 127, 128, 255, 256, 1000, 1023, 1024, 4096, 65_536, 1_000_003)


@dataclass(frozen=True)
class Decision:
    """A decision that is the same for all batches of `least_batch` samples or more."""

    value: bool
    least_batch: int


def decided_alike(node: Node) -> Decision | None:
    """The decision that a value stands for, if it follows from the batch size alone; else None.

    It is taken for the sizes up to 65, and some large ones, around powers of two and ten.
    """
    if tensors(node.meta["values"][0]):
        return None
    try:
        found = {bool(_at(node, count)) for count in _TRIED}
        alone = bool(_at(node, 1))
    except Exception:  # whatever the numbers of the user's are not made for
        return None
    if len(found) > 1:
        return None
    (value,) = found
    return Decision(value, 1 if alone == value else 2)


def _at(node: Node, count: int) -> Any:
    """A value that is no tensor, for a batch of so many samples."""
    arguments = map_arg((node.args, node.kwargs), lambda source: _hollow(source, count))
    return called(node.op, node.target, nn.Module(), *arguments)


def _hollow(node: Node, count: int) -> Any:
    small, large = node.meta["values"]
    if not tensors(small):
        return _at(node, count)
    others = iter(tensors(large))

    def hollow(tensor: Tensor) -> Tensor:
        shape = shape_for((tensor, next(others)), count)
        return torch.empty(shape, dtype=tensor.dtype, device="meta")

    return pytree.tree_map_only(Tensor, hollow, small)
