"""A rank's optimizer: what it moves, and who moves what of that which several ranks hold.

An `Updater` moves all that the rank holds. Of a `ServingUpdater`, one rank moves what several
hold. A `ShardedUpdater` (ZeRO-1) moves the rank's part of it: the n ranks of a replica group hold
the same pieces and get the same gradients, so that each would remember and compute the same. Here
each moves an n-th of the elements, and hands the moved weights to the others:

    gradients    all-reduced, as without            2 b (n-1)/n bytes
    update       of the own part only               state: 1/n
    weights      all-gathered                       b (n-1)/n bytes

where b is the size of the parameters with replicas; others are moved whole. All optimizers here
work element by element, so that the weights are the same bit by bit. For that, parts begin where
torch's kernels begin a vector, since they may round the rest of a tensor differently.

With gradients summed by "direct" the update goes between its two rounds
(`comm/owned.py`), which is the direct all-reduce of MiMatrix with the optimizer fused:

    gradients    summed by who moves them               b (n-1)/n bytes, one synchronisation
    update       of the own part only                   state: 1/n
    weights      handed out instead of the sums         b (n-1)/n bytes, one synchronisation

Outside of its own part a rank then has no sum, but its own gradient. A checkpoint knows nothing of
parts: for it, states are gathered one after another, and each is kept by the rank that writes it.

Source: Rajbhandari et al. 2020 (ZeRO, arXiv:1910.02054), sec. 5.1; Chen et al. 2018
(arXiv:1802.02326), of which `comm/algorithms/flat.py` says more. By other algorithms gradients are
summed just as without, in whatever order, or the bits would differ.
"""

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from workbench.comm.collectives import all_gather, broadcast
from workbench.comm.groups.group import Group
from workbench.comm.owned import Owned
from workbench.comm.pending import Pending
from workbench.layers.cut_model import CutModel
from workbench.plan.experiment.optimizers import AnyOptimizer, Remembered, at_rate
from workbench.plan.placement.placement import Replicate, Shard, divide
from workbench.program.step import RankProgram
from workbench.train.optimizer.rules import Rules
from workbench.train.optimizer.state import (
    EMA,
    Options,
    Schedule,
    build_optimizer,
    entry,
    first,
    grouped,
    load_state,
    state_tensors,
)
from workbench.train.step.gradients import Clipping, LossScaling


class Updater:
    """Moves this rank's parameters by their gradients.

    Args:
        held: what it moves, by name: the parameters of `model`, or parts of them.

    Attributes:
        values: the optimizer of each parameter of the model, with the options of its group.
        lr: the learning rate that is asked for, to which all others keep their ratio.
        remembered: what there is to be kept of each parameter: the optimizer's, averages, and the
            strategy's.
    """

    def __init__(
        self, value: AnyOptimizer, model: CutModel, held: Mapping[str, nn.Parameter]
    ) -> None:
        self.value, self.model, self.held = value, model, held
        self.clipping: Clipping | None = None
        self.scaling: LossScaling | None = None
        self.schedule: Schedule | None = None
        self.rules: Rules | None = None
        self.lr = value.lr
        self._unscheduled: Sequence[Options] = [{"lr": one.lr} for one in value.parted]
        self._decay: float | None = None
        self._averages: dict[str, Tensor] = {}
        shapes = {name: model.placements[name].shape for name in model.trainable()}
        self.values = value.of(shapes)
        self.remembered = {name: one.remembers for name, one in self.values.items()}
        dims = {name: len(shape) for name, shape in shapes.items()}
        self.optimizer = build_optimizer(value, *grouped(value, held, dims))

    def average(self, decay: float) -> None:
        """From now on averages what it moves, beginning with the weights as they are."""
        self._decay = decay
        self._averages = {n: p.detach().clone() for n, p in self.held.items() if p.numel() > 0}
        for name, known in self.remembered.items():
            elements = {**known.elements, EMA: math.nan}
            self.remembered[name] = Remembered(elements, known.numbers)

    def follow(self, rules: Rules) -> None:
        """From now on keeps what the strategy remembers."""
        self.rules = rules
        for name, known in self.remembered.items():
            own = dict.fromkeys(rules.names, math.nan)
            self.remembered[name] = Remembered({**known.elements, **own}, known.numbers)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Within it the model has averaged weights, if there are any; every rank calls it.

        The weights of training wait in a copy, and beside it are the averages of other ranks.
        """
        own = {}
        for name, average in self._whole_averages().items():
            parameter = self.model.trainable()[name].detach()
            own[name] = parameter.clone()
            parameter.copy_(average)
        try:
            yield
        finally:
            for name, weights in own.items():
                self.model.trainable()[name].detach().copy_(weights)

    def begin(self, step: int) -> None:
        """Sets the options that a step updates weights with."""
        options = self._unscheduled if self.schedule is None else self.schedule.at(step)
        for group, own in zip(self.optimizer.param_groups, options, strict=True):
            group.update(own)
            group["lr"] = at_rate(own["lr"], self.value.lr, self.lr)

    def clip(self, gradients: Mapping[str, Tensor] | None = None) -> None:
        """Clips gradients where this rank uses them; every rank calls it.

        Args:
            gradients: the sums, in pieces like the parameters; None: those that they have.
        """
        if self.clipping is None:
            return
        mine = self.mine(gradients)
        self.clipping.clip(mine, {name: self.users(name) for name in mine})

    def mine(self, gradients: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
        """What this rank moves its parameters by, as `clip`; but for parts without elements."""
        if gradients is None:
            named = self.model.trainable().items()
            gradients = {name: p.grad for name, p in named if p.grad is not None}
        return {name: part for name, part in self.used(gradients).items() if part.numel() > 0}

    def used(self, gradients: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """What this rank moves its parameters by, of gradients in pieces: views of them."""
        return gradients

    def users(self, name: str) -> int:
        """How many ranks use the same elements of a gradient as this one."""
        return _replicas(self.model, name).size * _copies(self.model, name)

    def step(self) -> None:
        """Moves every parameter that has a gradient, or this rank's part of it."""
        self._step()

    def hand_out(self) -> None:
        """Makes whole what the last step has moved in parts; all ranks call it."""

    def move(self) -> None:
        """Moves the weights by the gradients that they have, on all ranks that hold them."""
        self.clip()
        self.step()
        self.hand_out()

    def state(self, wanted: Collection[str]) -> dict[str, Tensor]:
        """What is remembered of this rank's pieces, by entry; all ranks call it.

        Args:
            wanted: the entries that must be there; there may be others.
        """
        return state_tensors(self.optimizer, self.values, self.held) | self._named_others()

    def load(self, read: Callable[[str, str], Tensor]) -> None:
        """Puts back what was remembered.

        Args:
            read: (state, name) -> this rank's piece of that state.
        """
        self._load_moved(read)
        if self.rules is not None:
            self.rules.load(read)

    @property
    def owned(self) -> Mapping[tuple[str, ...], Owned]:
        """Where gradients are summed by who moves them, by the names of those that travel together.

        All others are summed on every rank.
        """
        return {}

    def tensors(self) -> Iterator[Tensor]:
        for held in self.optimizer.state.values():
            yield from (value for value in held.values() if isinstance(value, Tensor))
        yield from self._averages.values()
        if self.rules is not None:
            yield from (tensor for _, _, tensor in self.rules.named())

    def _load_moved(self, read: Callable[[str, str], Tensor]) -> None:
        load_state(self.optimizer, self.values, self.held, read)
        for name, average in self._averages.items():
            average.copy_(read(EMA, name))

    @torch.no_grad()
    def _step(self) -> None:
        self.optimizer.step()
        if self._decay is not None:
            for name, average in self._averages.items():
                average.mul_(self._decay).add_(self.held[name], alpha=1 - self._decay)

    def _whole_averages(self) -> dict[str, Tensor]:
        """Averages of this rank's pieces; every rank calls it."""
        return self._averages

    def _named_others(self) -> dict[str, Tensor]:
        """Averages of this rank's pieces, and the strategy's states; every rank calls it."""
        found = {entry(EMA, name): average for name, average in self._whole_averages().items()}
        kept = () if self.rules is None else self.rules.named()
        return found | {entry(kind, name): tensor for kind, name, tensor in kept}


class ServingUpdater(Updater):
    """Moves what this rank is the server of, and what nobody else holds."""

    def __init__(self, value: AnyOptimizer, model: CutModel, server: int) -> None:
        self.server = server
        every = model.trainable()
        served = {
            name: parameter
            for name, parameter in every.items()
            if is_root(_replicas(model, name), server)
        }
        super().__init__(value, model, served)

    def used(self, gradients: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return {name: gradient for name, gradient in gradients.items() if name in self.held}

    def users(self, name: str) -> int:
        return _copies(self.model, name)

    def state(self, wanted: Collection[str]) -> dict[str, Tensor]:
        mine = state_tensors(self.optimizer, self.values, self.held)
        found = {}
        for name, parameter in self.model.trainable().items():
            group, value = _replicas(self.model, name), self.values[name]
            for state in value.remembers.names if parameter.numel() > 0 else ():
                key = entry(state, name)
                held = mine[key] if key in mine else first(value, parameter, state)
                held = held.to(parameter.device)
                told = broadcast(held, root_of(group, self.server), group, layer="optimizer")
                if key in wanted:
                    found[key] = told
        return found | self._named_others()

    def _whole_averages(self) -> dict[str, Tensor]:
        found = {}
        for name, parameter in self.model.trainable().items():
            if self._decay is not None and parameter.numel() > 0:
                group = _replicas(self.model, name)
                mine = self._averages.get(name, parameter.detach())
                root = root_of(group, self.server)
                found[name] = broadcast(mine, root, group, layer="optimizer")
        return found


def _replicas(model: CutModel, name: str) -> Group:
    """The ranks that hold the same piece of a parameter as this one."""
    return model.replica_group(model.placements[name].group_size)


def _copies(model: CutModel, name: str) -> int:
    """How many pieces of a parameter are the same, in a group of ranks that hold it together."""
    placed = model.placements[name]
    return placed.group_size if isinstance(placed.placement, Replicate) else 1


def root_of(group: Group, server: int) -> int:
    """Which of the ranks that hold the same pieces serves them, as an index of their group.

    The groups of ranks that hold all pieces of a layer are consecutive ranks: it is the one in
    the same such group as the world's server.
    """
    if group.size == 1:
        return 0
    return server // (group.ranks[1] - group.ranks[0])


def is_root(group: Group, server: int) -> bool:
    """Whether this rank serves the pieces that it has in common with its group."""
    return group.rank == root_of(group, server)


@dataclass(frozen=True)
class ShardedBucket:
    """Parameters whose new weights travel together.

    Attributes:
        parts: how many elements of each name each rank of the group moves: the first ones, the next
            ones and so on.
        owned: the buffer in which gradients are summed by who moves them; None: all ranks have the
            sums.
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
    """Moves this rank's parts, and takes the others from whoever moved them."""

    def __init__(
        self, value: AnyOptimizer, model: CutModel, buckets: Sequence[ShardedBucket]
    ) -> None:
        self._whole, self._buckets = model.trainable(), buckets
        self._moved: list[ShardedBucket] = []
        held = dict(self._whole)
        for bucket in buckets:
            for name in bucket.parts:
                held[name] = nn.Parameter(_own(self._whole[name].detach(), bucket, name))
        super().__init__(value, model, held)

    @classmethod
    def over_replicas(
        cls, program: RankProgram, model: CutModel, shares: Sequence[float]
    ) -> "ShardedUpdater":
        """Cuts all that other ranks hold as well."""
        experiment, every = program.program.experiment, model.trainable()
        buckets = []
        for together in program.handed:
            group = model.replica_group(together.group_size)
            of = [shares[rank] for rank in group.ranks]
            sizes = divide([every[name].numel() for name in together.names], of)
            bucket = ShardedBucket(group, dict(zip(together.names, sizes, strict=True)))
            if experiment.fused:
                owned = Owned(bucket.flat.sizes, group, every[together.names[0]])
                bucket = replace(bucket, owned=owned)
            buckets.append(bucket)
        return cls(experiment.optimizer, model, buckets)

    def used(self, gradients: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        homes = {name: bucket for bucket in self._buckets for name in bucket.parts}
        return {
            name: _own(gradient, homes[name], name) if name in homes else gradient
            for name, gradient in gradients.items()
        }

    def users(self, name: str) -> int:
        return _copies(self.model, name)

    @torch.no_grad()
    def step(self) -> None:
        self._moved = []
        for bucket in self._buckets:
            gradients = {name: self._whole[name].grad for name in bucket.parts}
            for name, gradient in gradients.items():
                part = None if gradient is None else _own(gradient, bucket, name)
                self.held[name].grad = part
            if any(gradient is not None for gradient in gradients.values()):
                self._moved.append(bucket)
        self._step()

    @torch.no_grad()
    def hand_out(self) -> None:
        under_way = []
        for bucket in self._moved:
            if bucket.owned is not None and bucket.owned.is_summed:
                under_way.append((bucket, self._start_hand_out(bucket, bucket.owned)))
            else:
                self._hand_out(bucket)
        for bucket, pending in under_way:
            pending.wait()
            self._take(bucket)
        self._moved = []

    @property
    def owned(self) -> Mapping[tuple[str, ...], Owned]:
        return {tuple(b.parts): b.owned for b in self._buckets if b.owned is not None}

    def state(self, wanted: Collection[str]) -> dict[str, Tensor]:
        found = state_tensors(self.optimizer, self.values, self.held)
        for bucket in self._buckets:
            for name in bucket.parts:
                for state in self.values[name].remembers.names:
                    key = entry(state, name)
                    whole = self._gathered(found.pop(key, None), bucket, name, state)
                    if key in wanted:
                        found[key] = whole
        return found | self._named_others()

    def _whole_averages(self) -> dict[str, Tensor]:
        found = dict(self._averages)
        for bucket in self._buckets if self._decay is not None else ():
            for name in bucket.parts:
                found[name] = self._gathered(found.pop(name, None), bucket, name, EMA)
        return found

    def _load_moved(self, read: Callable[[str, str], Tensor]) -> None:
        homes = {name: bucket for bucket in self._buckets for name in bucket.parts}

        def read_part(state: str, name: str) -> Tensor:
            piece = read(state, name)
            if state in self.values[name].remembers.numbers or name not in homes:
                return piece
            return _own(piece, homes[name], name).clone()

        super()._load_moved(read_part)

    def _hand_out(self, bucket: ShardedBucket) -> None:
        """Makes the parameters of a bucket whole again."""
        mine = torch.cat([self.held[name].detach() for name in bucket.parts])
        every = all_gather(mine, bucket.flat, bucket.group, layer="parameters")
        sizes = [self._whole[name].numel() for name in bucket.parts]
        for name, piece in zip(bucket.parts, every.split(sizes), strict=True):
            self._whole[name].copy_(piece.view_as(self._whole[name]))

    def _start_hand_out(self, bucket: ShardedBucket, owned: Owned) -> Pending:
        mine = [self.held[name].detach() for name in bucket.parts]
        torch.cat(mine, out=owned.outgoing)
        return owned.start_hand_out(layer="parameters")

    def _take(self, bucket: ShardedBucket) -> None:
        """Puts what others have handed out into its places."""
        assert bucket.owned is not None
        for rank, piece in enumerate(bucket.owned.pieces):
            if rank == bucket.group.rank:
                continue
            own = piece.split([parts[rank] for parts in bucket.parts.values()])
            for name, part in zip(bucket.parts, own, strict=True):
                _part(self._whole[name], bucket, name, rank).copy_(part)

    def _gathered(
        self, mine: Tensor | None, bucket: ShardedBucket, name: str, state: str
    ) -> Tensor:
        """A state of a whole piece; of a part without elements nothing is remembered."""
        whole = self._whole[name]
        if state in self.values[name].remembers.numbers:  # which whoever moves a part has
            cut = Shard(0, tuple(int(size > 0) for size in bucket.parts[name]))
            number = torch.zeros(0) if mine is None else mine.view(1)
            return all_gather(number.to(whole.device), cut, bucket.group, layer="optimizer")[0]
        part = whole.new_empty(0).detach() if mine is None else mine
        every = all_gather(part, bucket.cut(name), bucket.group, layer="optimizer")
        return every.view_as(whole)


def _own(whole: Tensor, bucket: ShardedBucket, name: str) -> Tensor:
    return _part(whole, bucket, name, bucket.group.rank)


def _part(whole: Tensor, bucket: ShardedBucket, name: str, index: int) -> Tensor:
    """A view of the part of the rank at this index of the group."""
    start, length = bucket.cut(name).span(index)
    return whole.view(-1)[start : start + length]
