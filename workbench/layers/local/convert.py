"""A plan's conversion as a module, so that the rewritten model shows each collective by name."""

from collections import deque

import torch
from torch import Tensor, nn

from workbench.comm.groups.group import Group
from workbench.comm.nonblocking import PendingGather, start_all_gather, take_gathered
from workbench.comm.regions import (
    GradientPlacement,
    copy_to,
    exchange,
    gather_from,
    reduce_from,
    reduce_scatter_to,
    scatter_to,
)
from workbench.layers.local.context import BatchContext
from workbench.plan.placement.placement import ROWS, Conversion, Layout, Partial, Replicate, Shard


class ConvertLayout(nn.Module):
    """Changes the layout of an activation; its backward is the dual change.

    Args:
        learns: whether a gradient comes back to the activation, by the graph. Then it does on
            every rank, also where nothing of what is trained is at hand, such as a bias that
            another rank adds; else on none. So all ranks take part in the same collectives.
    """

    def __init__(
        self,
        conversion: Conversion,
        group: Group,
        context: BatchContext,
        layer: str,
        *,
        learns: bool,
    ) -> None:
        super().__init__()
        self.conversion, self.group, self.context, self.layer = conversion, group, context, layer
        self.learns = learns
        self._ahead: deque[PendingGather] = deque()
        before, after = conversion.source.placement, conversion.target.placement
        blocks = conversion.blocks
        # Places of features: pieces of blocks lie end to end, and block by block they are whole.
        self._joined = _places(before, blocks[0]) if isinstance(before, Shard) else None
        self._parted = _places(after, blocks[1]) if isinstance(after, Shard) else None

    def start(self, x: Tensor, rows: tuple[int, ...]) -> None:
        """Starts to gather rows for a forward pass to come; passes take them in this order.

        Other conversions than a gather of rows do nothing here, nor do ranks that share memory:
        there a gather takes no longer than what would start it.

        Args:
            x: the activation [own rows, ...] that `forward` will get.
        """
        source, target = self.conversion.source, self.conversion.target
        gathers = source == ROWS and target.placement == Replicate()
        if gathers and self.group.staging is None:
            members = (rows[rank] * self.conversion.rows for rank in self.group.ranks)
            started = start_all_gather(x, Shard(0, tuple(members)), self.group, layer=self.layer)
            self._ahead.append(started)

    def forward(self, x: Tensor) -> Tensor:
        """Returns x in the layout that the conversion leads to.

        Raises:
            CommError: other ranks did not come, or came for something else; in backward, too.
        """
        if x.requires_grad != self.learns and torch.is_grad_enabled():
            x = x.detach().requires_grad_(self.learns)
        if self._parted is not None:
            dim, places = self._parted
            x = x.index_select(dim, places.argsort().to(x.device))
        converted = self._converted(x)
        if self._joined is not None:
            dim, places = self._joined
            converted = converted.index_select(dim, places.to(x.device))
        return converted

    def _converted(self, x: Tensor) -> Tensor:
        group, layer = self.group, self.layer
        source, target = self._cut(self.conversion.source), self._cut(self.conversion.target)
        partial = self.conversion.gradient == "partial"
        gradient: GradientPlacement = "partial" if partial else "replicate"
        match source, target:
            case Replicate(), Replicate():
                return copy_to(x, group, layer=layer)
            case Partial(), Replicate():
                return reduce_from(x, group, gradient=gradient, layer=layer)
            case Partial(), Shard() as cut:
                return reduce_scatter_to(x, cut, group, layer=layer)
            case Replicate(), Shard() as cut:
                return scatter_to(x, cut, group, layer=layer)
            case Shard(), Replicate() if self._ahead:
                return take_gathered(x, self._ahead.popleft(), gradient)
            case Shard() as cut, Replicate():
                return gather_from(x, cut, group, gradient=gradient, layer=layer)
            case Shard() as cut, Shard() as other:
                return exchange(x, cut, other, group, layer=layer)
        raise AssertionError(f"no conversion makes summands: {self.conversion}")

    def _cut(self, layout: Layout) -> Partial | Replicate | Shard:
        """Returns the placement over the group; own rows are its rows, cut along dimension 0."""
        if layout == ROWS:
            return self.context.group_rows(self.conversion.group_size, self.conversion.rows)
        return layout.placement

    def extra_repr(self) -> str:
        """Returns what `print(model)` says of it."""
        conversion = self.conversion
        back = ", gradient partial" if conversion.gradient == "partial" else ""
        return f"{conversion.source} -> {conversion.target}{back}"


def _places(cut: Shard, blocks: int) -> tuple[int, Tensor] | None:
    """(dimension, where each of its elements lies among all ranks' pieces, end to end).

    Args:
        blocks: the equal blocks of the dimension; 1: elements lie in their order, and None is
            returned.
    """
    if blocks == 1:
        return None
    ends = torch.arange(cut.extent).split(cut.sizes)
    pieces = [piece.view(blocks, -1) for piece in ends]
    return cut.dim, torch.cat(pieces, dim=1).flatten()
