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

A checkpoint knows nothing of parts: for it, states are gathered one after another, and each is
kept by the rank that writes it.

Source: Rajbhandari et al. 2020 (ZeRO, arXiv:1910.02054), sec. 5.1, whose traffic is b (n-1)/n
less: they reduce-scatter the gradients. Here these are summed just as without, in whatever
order, or the bits would differ.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from workbench.comm.collectives import all_gather
from workbench.comm.group import Group
from workbench.layers.cut_model import CutModel
from workbench.plan.division import divide
from workbench.plan.experiment import Optimizer
from workbench.plan.placement import Shard
from workbench.train.gradients import bucketed
from workbench.train.optimizer import entry, state_names, state_tensors
from workbench.train.updater import Updater


@dataclass(frozen=True)
class Bucket:
    """Parameters whose new weights travel together.

    Attributes:
        group: the ranks that hold them.
        parts: for each name, how many elements each rank of the group moves: the first ones,
            the next ones and so on.
    """

    group: Group
    parts: Mapping[str, tuple[int, ...]]

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
    ) -> "ShardedUpdater":
        """Cuts all that other ranks hold as well.

        Args:
            value: the experiment's optimizer.
            model: this rank's part.
            bucket_bytes: a bucket is closed once it holds this much.
            apart: sets of names; those of two sets may be moved at different times.
        """
        every = model.trainable()
        buckets = []
        for names in apart:
            some = {name: parameter for name, parameter in every.items() if name in names}
            for together, group in bucketed(model, some, bucket_bytes):
                sizes = divide([every[name].numel() for name in together], group.size)
                buckets.append(Bucket(group, dict(zip(together, sizes, strict=True))))
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
        for bucket in moved:
            self._hand_out(bucket)

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
    start, length = bucket.cut(name).span(bucket.group.rank)
    return whole.view(-1)[start : start + length]
