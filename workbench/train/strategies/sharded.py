"""The optimizer's state, cut over the ranks that hold the same parameters.

The n ranks of a replica group hold the same pieces and get the same gradients, so that each
would remember and compute the same. Here each moves an n-th of the elements, and hands the
moved weights to the others:

    gradients    all-reduced, as without            2 b (n-1)/n bytes
    update       of the own part only               state: 1/n
    weights      all-gathered                       b (n-1)/n bytes

of which b is the size of the parameters with replicas; others are moved whole. All optimizers
here work element by element, so that the weights are the same bit by bit. For that, parts begin
where torch's kernels begin a vector, since they may round the rest of a tensor differently.

With gradients summed by "direct" the update goes between its two rounds (`comm/owned.py`), which
is the direct all-reduce of MiMatrix with the optimizer fused:

    gradients    summed by who moves them               b (n-1)/n bytes, one synchronisation
    update       of the own part only                   state: 1/n
    weights      handed out instead of the sums         b (n-1)/n bytes, one synchronisation

Outside of its own part a rank then has no sum, but its own gradient.

A checkpoint knows nothing of parts: for it, states are gathered one after another, and each is
kept by the rank that writes it.

Source: Rajbhandari et al. 2020 (ZeRO, arXiv:1910.02054), sec. 5.1; Chen et al. 2018
(arXiv:1802.02326), of which `comm/direct.py` says more. By other algorithms gradients are summed
just as without, in whatever order, or the bits would differ.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from workbench.comm.algorithms.owned import Owned
from workbench.comm.collectives import all_gather
from workbench.comm.groups.group import Group
from workbench.comm.pending import Pending
from workbench.layers.cut_model import CutModel
from workbench.plan.division import divide
from workbench.plan.experiment import Optimizer
from workbench.plan.placement import Shard
from workbench.train.strategies.gradients import bucketed
from workbench.train.strategies.optimizer import Updater, entry, state_names, state_tensors


@dataclass(frozen=True)
class Bucket:
    """Parameters whose new weights travel together.

    Attributes:
        group: the ranks that hold them.
        parts: for each name, how many elements each rank of the group moves: the first ones,
            the next ones and so on.
        owned: where gradients are summed by who moves them; None: all ranks have the sums.
    """

    group: Group
    parts: Mapping[str, tuple[int, ...]]
    owned: Owned | None = None

    def cut(self, name: str) -> Shard:
        """How a parameter, as a flat tensor, lies over the group."""
        return Shard(0, self.parts[name])

    @property
    def flat(self) -> Shard:
        """How all parameters, one after another in one flat tensor, lie over the group."""
        return Shard(0, tuple(map(sum, zip(*self.parts.values(), strict=True))))


class ShardedUpdater(Updater):
    """Moves this rank's parts, and takes the others from whoever moved them.

    Args:
        value: the experiment's optimizer.
        model: this rank's part.
        buckets: of the parameters with replicas.
    """

    def __init__(self, value: Optimizer, model: CutModel, buckets: Sequence[Bucket]) -> None:
        self._whole, self._buckets = model.trainable(), buckets
        held = dict(self._whole)
        for bucket in buckets:
            for name in bucket.parts:
                held[name] = nn.Parameter(_own(self._whole[name].detach(), bucket, name))
        super().__init__(value, model, held)

    @classmethod
    def over_replicas(
        cls,
        value: Optimizer,
        model: CutModel,
        bucket_bytes: int,
        apart: Sequence[Collection[str]],
        shares: Sequence[float],
        *,
        fused: bool = False,
    ) -> "ShardedUpdater":
        """Cuts all that other ranks hold as well.

        Args:
            value: the experiment's optimizer.
            model: this rank's part.
            bucket_bytes: a bucket is closed once it holds this much.
            apart: sets of names; those of two sets may be moved at different times.
            shares: of the elements, one for each rank of the world; of ranks that hold the same
                parameters not all are zero.
            fused: gradients are summed by who moves them.
        """
        every = model.trainable()
        buckets = []
        for names in apart:
            some = {name: parameter for name, parameter in every.items() if name in names}
            for together, group in bucketed(model, some, bucket_bytes):
                of = [shares[rank] for rank in group.ranks]
                sizes = divide([every[name].numel() for name in together], of)
                bucket = Bucket(group, dict(zip(together, sizes, strict=True)))
                if fused:
                    owned = Owned(bucket.flat.sizes, group, every[together[0]])
                    bucket = replace(bucket, owned=owned)
                buckets.append(bucket)
        return cls(value, model, buckets)

    @torch.no_grad()
    def step(self) -> None:
        moved = []
        for bucket in self._buckets:
            gradients = {name: self._whole[name].grad for name in bucket.parts}
            for name, gradient in gradients.items():
                part = None if gradient is None else _own(gradient, bucket, name)
                self.held[name].grad = part
            if any(gradient is not None for gradient in gradients.values()):
                moved.append(bucket)
        self.optimizer.step()
        under_way = []
        for bucket in moved:
            if bucket.owned is not None and bucket.owned.is_summed:
                under_way.append((bucket, self._start_hand_out(bucket, bucket.owned)))
            else:
                self._hand_out(bucket)
        for bucket, pending in under_way:
            pending.wait()
            self._take(bucket)

    @property
    def owned(self) -> Mapping[tuple[str, ...], Owned]:
        return {tuple(b.parts): b.owned for b in self._buckets if b.owned is not None}

    def state(self, wanted: Collection[str]) -> dict[str, Tensor]:
        found = state_tensors(self.optimizer, self.value, self.held)
        for bucket in self._buckets:
            for name in bucket.parts:
                for state in state_names(self.value):
                    key = entry(state, name)
                    whole = self._gathered(found.pop(key, None), bucket, name, state)
                    if key in wanted:
                        found[key] = whole
        return found

    def load(self, read: Callable[[str, str], Tensor]) -> None:
        homes = {name: bucket for bucket in self._buckets for name in bucket.parts}

        def read_part(state: str, name: str) -> Tensor:
            piece = read(state, name)
            if state == "step" or name not in homes:
                return piece
            return _own(piece, homes[name], name).clone()

        super().load(read_part)

    def _hand_out(self, bucket: Bucket) -> None:
        """Makes the parameters of a bucket whole again."""
        mine = torch.cat([self.held[name].detach() for name in bucket.parts])
        every = all_gather(mine, bucket.flat, bucket.group, layer="parameters")
        sizes = [self._whole[name].numel() for name in bucket.parts]
        for name, piece in zip(bucket.parts, every.split(sizes), strict=True):
            self._whole[name].copy_(piece.view_as(self._whole[name]))

    def _start_hand_out(self, bucket: Bucket, owned: Owned) -> Pending:
        mine = [self.held[name].detach() for name in bucket.parts]
        torch.cat(mine, out=owned.outgoing)
        return owned.start_hand_out(layer="parameters")

    def _take(self, bucket: Bucket) -> None:
        """Puts what others have handed out into its places."""
        assert bucket.owned is not None
        for rank, piece in enumerate(bucket.owned.pieces):
            if rank == bucket.group.rank:
                continue
            own = piece.split([parts[rank] for parts in bucket.parts.values()])
            for name, part in zip(bucket.parts, own, strict=True):
                _part(self._whole[name], bucket, name, rank).copy_(part)

    def _gathered(self, mine: Tensor | None, bucket: Bucket, name: str, state: str) -> Tensor:
        """A state of a whole piece; of a part without elements nothing is remembered."""
        whole = self._whole[name]
        if state == "step":  # one number, which whoever moves a part has
            cut = Shard(0, tuple(int(size > 0) for size in bucket.parts[name]))
            count = torch.zeros(0, device=whole.device) if mine is None else mine.view(1)
            return all_gather(count, cut, bucket.group, layer="optimizer")[0]
        part = whole.new_empty(0).detach() if mine is None else mine
        every = all_gather(part, bucket.cut(name), bucket.group, layer="optimizer")
        return every.view_as(whole)


def _own(whole: Tensor, bucket: Bucket, name: str) -> Tensor:
    """A view of this rank's part."""
    return _part(whole, bucket, name, bucket.group.rank)


def _part(whole: Tensor, bucket: Bucket, name: str, index: int) -> Tensor:
    """A view of the part of the rank at this index of the group."""
    start, length = bucket.cut(name).span(index)
    return whole.view(-1)[start : start + length]
