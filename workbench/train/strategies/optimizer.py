"""A rank's optimizer: what it moves, what it remembers of that, as named tensors and back.

The state of a parameter is cut as the parameter is, so a checkpoint holds it as logical
tensors of their own, named `optimizer/<state>/<parameter>`:

    sgd           momentum_buffer (none without momentum)
    adam, adamw   step (one number), exp_avg, exp_avg_sq

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
(`comm/algorithms/owned.py`), which is the direct all-reduce of MiMatrix with the optimizer fused:

    gradients    summed by who moves them               b (n-1)/n bytes, one synchronisation
    update       of the own part only                   state: 1/n
    weights      handed out instead of the sums         b (n-1)/n bytes, one synchronisation

Outside of its own part a rank then has no sum, but its own gradient. A checkpoint knows nothing of
parts: for it, states are gathered one after another, and each is kept by the rank that writes it.

Source: Rajbhandari et al. 2020 (ZeRO, arXiv:1910.02054), sec. 5.1; Chen et al. 2018
(arXiv:1802.02326), of which `comm/algorithms/flat.py` says more. By other algorithms gradients are
summed just as without, in whatever order, or the bits would differ.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from workbench.comm.algorithms.owned import Owned
from workbench.comm.collectives import all_gather, broadcast
from workbench.comm.groups.group import Group
from workbench.comm.pending import Pending
from workbench.layers.cut_model import CutModel
from workbench.plan.experiment.experiment import SGD, Adam, AdamW, Optimizer
from workbench.plan.placement.division import divide
from workbench.plan.placement.placement import Shard
from workbench.program.step import RankProgram

# Where torch has one kernel for a whole update.
_FUSED_ON = ("cpu", "cuda")


def build_optimizer(value: Optimizer, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """The torch optimizer of this value, fused where torch can.

    Args:
        value: the optimizer of an `Experiment`.
        parameters: this rank's pieces; those of size zero are left out, and there may be none left,
            as on a rank that owns nothing.
    """
    held = [parameter for parameter in parameters if parameter.numel() > 0]
    fused = all(p.is_floating_point() and p.device.type in _FUSED_ON for p in held)
    build = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}
    options: dict[str, Any] = value.model_dump(exclude={"kind"})
    return build[value.kind]([{"params": held}], **options, fused=fused or None)


def state_names(value: Optimizer) -> tuple[str, ...]:
    """What the optimizer remembers of each parameter."""
    match value:
        case SGD():
            return ("momentum_buffer",) if value.momentum > 0 else ()
        case Adam() | AdamW():
            return ("step", "exp_avg", "exp_avg_sq")


def entry(state: str, name: str) -> str:
    """The logical tensor that holds this state of the parameter `name`."""
    return f"optimizer/{state}/{name}"


def state_tensors(
    optimizer: torch.optim.Optimizer, value: Optimizer, parameters: Mapping[str, nn.Parameter]
) -> dict[str, Tensor]:
    """The state of these parameters, by entry; the tensors are the optimizer's own.

    A parameter that was never updated has its state in full as well: zeros, from which all
    three optimizers take the same first step as from no state. One of size zero has none.
    """
    return {
        entry(state, name): _held(optimizer, parameter, state)
        for name, parameter in parameters.items()
        if parameter.numel() > 0
        for state in state_names(value)
    }


def load_state(
    optimizer: torch.optim.Optimizer,
    value: Optimizer,
    parameters: Mapping[str, nn.Parameter],
    read: Callable[[str, str], Tensor],
) -> None:
    """Puts back what `state_tensors` gave.

    Args:
        optimizer: a new one, of `value`.
        value: what it was built from.
        parameters: the parameters that it updates, by name; others may be among them if of size
            zero.
        read: (state, name) -> this rank's piece of that state; it becomes the optimizer's own.
    """
    names = {id(parameter): name for name, parameter in parameters.items()}
    content = optimizer.state_dict()
    content["state"] = {
        index: {state: read(state, names[id(parameter)]) for state in state_names(value)}
        for index, parameter in enumerate(optimizer.param_groups[0]["params"])
    }
    optimizer.load_state_dict(content)


def set_rate(optimizer: torch.optim.Optimizer, value: float) -> None:
    """Has an optimizer move weights at this rate from now on; what it remembers stays."""
    for group in optimizer.param_groups:
        group["lr"] = value


def _held(optimizer: torch.optim.Optimizer, parameter: nn.Parameter, state: str) -> Tensor:
    held = optimizer.state[parameter].get(state) if parameter in optimizer.state else None
    if held is not None:
        return held
    return torch.zeros(()) if state == "step" else torch.zeros_like(parameter)


class Updater:
    """Moves this rank's parameters by their gradients.

    Args:
        value: the experiment's optimizer.
        model: this rank's part.
        held: what it moves, by name: the parameters of `model`, or parts of them.
    """

    def __init__(self, value: Optimizer, model: CutModel, held: Mapping[str, nn.Parameter]) -> None:
        self.value, self.model, self.held = value, model, held
        self.optimizer = build_optimizer(value, held.values())

    def step(self) -> None:
        """Moves every parameter that has a gradient, or this rank's part of it."""
        self.optimizer.step()

    def hand_out(self) -> None:
        """Makes whole what the last step has moved in parts; all ranks call it."""

    def move(self) -> None:
        """Moves the weights on all ranks that hold them."""
        self.step()
        self.hand_out()

    def state(self, wanted: Collection[str]) -> dict[str, Tensor]:
        """What is remembered of this rank's pieces, by entry; all ranks call it.

        Args:
            wanted: the entries that must be there; there may be others.
        """
        return state_tensors(self.optimizer, self.value, self.held)

    def load(self, read: Callable[[str, str], Tensor]) -> None:
        """Puts back what was remembered.

        Args:
            read: (state, name) -> this rank's piece of that state.
        """
        load_state(self.optimizer, self.value, self.held, read)

    @property
    def owned(self) -> Mapping[tuple[str, ...], Owned]:
        """Where gradients are summed by who moves them, by the names of those that travel together.

        All others are summed on every rank.
        """
        return {}

    def tensors(self) -> Iterator[Tensor]:
        """What is remembered on this rank, for the account of memory."""
        for held in self.optimizer.state.values():
            yield from (value for value in held.values() if isinstance(value, Tensor))


class ServingUpdater(Updater):
    """Moves what this rank is the server of, and what nobody else holds.

    Args:
        value: the experiment's optimizer.
        model: this rank's part.
        server: a rank of the world.
    """

    def __init__(self, value: Optimizer, model: CutModel, server: int) -> None:
        self.server = server
        every = model.trainable()
        served = {
            name: parameter
            for name, parameter in every.items()
            if is_root(_replicas(model, name), server)
        }
        super().__init__(value, model, served)

    def state(self, wanted: Collection[str]) -> dict[str, Tensor]:
        mine = state_tensors(self.optimizer, self.value, self.held)
        found = {}
        for name, parameter in self.model.trainable().items():
            group = _replicas(self.model, name)
            for state in state_names(self.value) if parameter.numel() > 0 else ():
                key = entry(state, name)
                like = parameter.detach() if state != "step" else torch.zeros(())
                held = mine.get(key, like).to(parameter.device)
                told = broadcast(held, root_of(group, self.server), group, layer="optimizer")
                if key in wanted:
                    found[key] = told
        return found


def _replicas(model: CutModel, name: str) -> Group:
    """The ranks that hold the same piece of a parameter as this one."""
    return model.replica_group(model.placements[name].group_size)


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
        group: the ranks that hold them.
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
    """Moves this rank's parts, and takes the others from whoever moved them.

    Args:
        value: the experiment's optimizer.
        model: this rank's part.
        buckets: the buckets of the parameters with replicas.
    """

    def __init__(self, value: Optimizer, model: CutModel, buckets: Sequence[ShardedBucket]) -> None:
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
        """Cuts all that other ranks hold as well.

        Args:
            program: what this rank executes: its buckets, and whether gradients are summed by who
                moves them.
            model: this rank's part.
            shares: each rank's share of the elements; of ranks that hold the same parameters not
                all are zero.
        """
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
        self.optimizer.step()

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
        if state == "step":  # one number, which whoever moves a part has
            cut = Shard(0, tuple(int(size > 0) for size in bucket.parts[name]))
            count = torch.zeros(0, device=whole.device) if mine is None else mine.view(1)
            return all_gather(count, cut, bucket.group, layer="optimizer")[0]
        part = whole.new_empty(0).detach() if mine is None else mine
        every = all_gather(part, bucket.cut(name), bucket.group, layer="optimizer")
        return every.view_as(whole)


def _own(whole: Tensor, bucket: ShardedBucket, name: str) -> Tensor:
    """A view of this rank's part."""
    return _part(whole, bucket, name, bucket.group.rank)


def _part(whole: Tensor, bucket: ShardedBucket, name: str, index: int) -> Tensor:
    """A view of the part of the rank at this index of the group."""
    start, length = bucket.cut(name).span(index)
    return whole.view(-1)[start : start + length]
