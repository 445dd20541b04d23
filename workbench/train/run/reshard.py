"""A run goes on under another plan: at a step's end, with all that it has learnt.

    on the way      weights, buffers, the optimizer's state, gradients in flight, what codecs have
                    left out of gradients: what changes hands, and nothing else
    built anew      this rank's part of the model, its optimizer, its strategy's buckets
    dropped         what codecs have left out of parameters that no two ranks hold now: nothing of
                    theirs is encoded any more; the run notes it
    as before       the data and its order, the step, the seed, the loss scale

Elements that belong elsewhere under the new plan (`plan/plans/reshard.py`) travel straight from
place to place (`comm/parts.py`), so that nothing more than the pieces is held, while each rank
copies what it keeps. The run that goes on is the one that would have been resumed from a checkpoint
at this step.
"""

from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass

import torch
from torch import Tensor

from workbench.comm.collectives import all_gather
from workbench.comm.groups.group import Group
from workbench.comm.messages.recorder import Recorder
from workbench.comm.parts import MOST_BYTES, LocalCopy, SentPart, exchange_parts
from workbench.layers.cut import cut
from workbench.layers.cut_model import CutModel
from workbench.layers.local.context import BatchContext
from workbench.model.weights.files import TORCH_DTYPES
from workbench.plan.experiment.optimizers import Remembered
from workbench.plan.placement.flow import WeightPlacement
from workbench.plan.placement.placement import Shard
from workbench.plan.plans.plan import Plan
from workbench.plan.plans.reshard import Move, Region, Reshard, held, replica_after
from workbench.program.step import program_of
from workbench.train.optimizer.state import entry
from workbench.train.run.rank import RankState, groups_for
from workbench.train.step.executor import Stepper
from workbench.train.step.loss import average_statistics
from workbench.train.step.state import (
    RESIDUAL,
    InFlight,
    named,
    residual_entry,
    restore_residuals,
)
from workbench.train.strategy.strategy import strategy_of, updater_of

RESHARD = "reshard"


@dataclass(frozen=True)
class Entry:
    """A tensor that lies as a weight does: the weight, or a state of it.

    Attributes:
        replica: the only one that has it, of the sets of ranks that hold the whole weight; None:
            all have.
    """

    key: str
    weight: str
    dtype: torch.dtype
    replica: int | None = None


class Pieces:
    """This rank's pieces under a plan, by key: where a model cut by that plan reads its weights."""

    def __init__(
        self, placements: Mapping[str, WeightPlacement], tensors: dict[str, Tensor]
    ) -> None:
        self._placements, self._tensors = placements, tensors
        self.names = tuple(tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._placements[name].shape

    def read(self, name: str, shard: Shard | None = None, rank: int = 0) -> Tensor:
        """This rank's piece, handed over; it can be read once."""
        return self._tensors.pop(name)


def move_pieces(
    reshard: Reshard, entries: Sequence[Entry], own: Mapping[str, Tensor], everyone: Group
) -> dict[str, Tensor]:
    """This rank's pieces under the new plan; every rank calls it.

    Args:
        entries: what there is, the same on all ranks.
        own: this rank's pieces under the old plan, by key; of an each of which it holds nothing,
            none is needed.

    Raises:
        CommError: a rank is gone. `own` is as it was.
    """
    rank, found = everyone.rank, dict[str, Tensor]()
    kept = dict[torch.dtype, list[LocalCopy]]()
    for each in entries:
        before, after = (p.flow.weights[each.weight] for p in (reshard.before, reshard.after))
        later = replica_after(after, everyone.size, each.replica)
        if later is None and _lies_alike(before, after):
            found[each.key] = own[each.key] if each.key in own else _empty(each, after, rank)
        elif later is None or rank // after.group_size == later:
            found[each.key] = piece = _empty(each, after, rank)
            kept.setdefault(each.dtype, []).extend(_kept(each, before, after, rank, own, piece))
    for dtype in sorted({each.dtype for each in entries}, key=str):
        alike = [each for each in entries if each.dtype == dtype]
        parts = _parts(alike, reshard, own, found, rank)
        exchange_parts(parts, dtype, everyone, kept.get(dtype, ()), layer=RESHARD)
    return found


def _lies_alike(before: WeightPlacement, after: WeightPlacement) -> bool:
    return (before.placement, before.group_size) == (after.placement, after.group_size)


def _kept(
    entry: Entry,
    before: WeightPlacement,
    after: WeightPlacement,
    rank: int,
    own: Mapping[str, Tensor],
    piece: Tensor,
) -> Iterator[LocalCopy]:
    """What this rank held of its new piece already."""
    for mine in held(before, rank, entry.replica):
        for wanted in held(after, rank):
            common = tuple(
                (max(a, c), min(b, d)) for (a, b), (c, d) in zip(mine, wanted, strict=True)
            )
            if all(start < stop for start, stop in common):
                source = own[entry.key][_place(before, rank, common)]
                yield LocalCopy(source, piece[_place(after, rank, common)])


def _empty(entry: Entry, placed: WeightPlacement, rank: int) -> Tensor:
    return torch.empty(placed.piece_shape(rank), dtype=entry.dtype)


def _parts(
    entries: Sequence[Entry],
    reshard: Reshard,
    own: Mapping[str, Tensor],
    found: Mapping[str, Tensor],
    rank: int,
) -> list[SentPart]:
    """What travels, with the places from and to which it does."""
    of_weight: dict[str, list[Move]] = {}
    for move in reshard.moves:
        of_weight.setdefault(move.name, []).append(move)
    parts = []
    for each in entries:
        before, after = (p.flow.weights[each.weight] for p in (reshard.before, reshard.after))
        moves: Sequence[Move] = of_weight.get(each.weight, ())
        if each.replica is not None:
            moves = reshard.residual_moves(each.weight, each.replica)
        for whole in moves:
            for move in whole.parts(MOST_BYTES // each.dtype.itemsize):
                tensor = None
                if move.source == rank:
                    tensor = own[each.key][_place(before, rank, move.region)]
                elif move.target == rank:
                    tensor = found[each.key][_place(after, rank, move.region)]
                parts.append(SentPart(move.source, move.target, move.numel, tensor))
    return parts


def _place(placed: WeightPlacement, rank: int, region: Region) -> tuple[slice, ...]:
    """Where a region of the whole tensor is in a rank's piece, which holds all of it."""
    place = [slice(start, stop) for start, stop in region]
    if isinstance(placed.placement, Shard):
        dim, before = placed.placement.dim, 0
        start, stop = region[dim]
        for first, length in placed.placement.spans(rank % placed.group_size):
            if first <= start and stop <= first + length:
                place[dim] = slice(before + start - first, before + stop - first)
                break
            before += length
    return tuple(place)


_NAMED = 3  # parameters, in a note


def under(state: RankState, plan: Plan, done: int) -> RankState:
    """A rank's part of the run under another plan; every rank calls it after the same step.

    Args:
        state: the state as it is; not to be used afterwards.

    Raises:
        PlanError: the plan is of another model or world size.
        ExperimentError: it leaves a rank too few rows of some batch for a layer.
        CommError: a rank is gone; the run goes on from its last checkpoint.
    """
    reshard = Reshard(state.experiment.plan, plan)
    experiment = state.experiment.replace(plan=plan)
    data, held_out = state.stepper.feed.data, state.test_data
    state.stepper.feed.close()
    experiment.check_rows((len(data), 0 if held_out is None else len(held_out)))
    state.strategy.settle()
    average_statistics(state.model)
    waiting = state.strategy.in_flight
    moved, numbers = _moved(state, reshard, waiting)
    world, dtype = state.world, state.stepper.dtype
    groups, asked = groups_for(plan, reshard.before, world, state.groups, state.asked)
    context = BatchContext(world.rank, (0,) * world.size, seed=experiment.seed)
    reader = Pieces(plan.flow.weights, moved)
    traced, device = deepcopy(state.traced), world.device
    model = cut(plan, context, groups, reader, device=device, dtype=dtype, traced=traced)
    program = program_of(experiment).of(world.rank)
    updater = updater_of(program, model, state.everyone)
    updater.lr, updater.scaling = state.updater.lr, state.updater.scaling
    updater.begin(done)

    def read(kept: str, name: str) -> Tensor:
        key = entry(kept, name)
        return numbers[key] if key in numbers else moved.pop(key)

    updater.load(read)
    left = [_left(flight, moved) for flight in waiting]
    strategy = strategy_of(program, model, updater, done, left, state.notes)
    left_out = {key: moved.pop(key) for key in list(moved) if key.startswith(RESIDUAL)}
    restore_residuals(Pieces(plan.flow.weights, left_out), model, strategy.residuals)
    if state.strategy.residuals and (note := _dropped(reshard, model, done)):
        state.notes.append(note)
    return RankState(
        experiment=experiment,
        world=world,
        everyone=state.everyone,
        model=model,
        updater=updater,
        stepper=Stepper(experiment, model, strategy, data, world, dtype, state.loss),
        test_data=held_out,
        loss=state.loss,
        scoring=state.scoring,
        traced=state.traced,
        groups=groups,
        asked=asked,
        first_step=done,
        notes=state.notes,
    )


def resharded_bytes(recorder: Recorder) -> int:
    """The bytes that reshardings have brought to this rank so far."""
    rows = recorder.rows()
    return sum(row.bytes for row in rows if (row.op, row.layer) == ("all_to_all", RESHARD))


def _moved(
    state: RankState, reshard: Reshard, waiting: Sequence[InFlight]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """This rank's new pieces by entry, and the single numbers of the optimizer's state."""
    known, model = state.updater.remembered, state.model
    trainable = tuple(model.trainable())
    wanted = {entry(kind, name) for name in trainable for kind in known[name].names}
    own: dict[str, Tensor] = model.pieces() | state.updater.state(wanted)
    own = {key: tensor.detach() for key, tensor in own.items()}
    entries = [
        Entry(name, name, _dtype(placed.dtype, state.stepper.dtype))
        for name, placed in model.placements.items()
    ]
    entries += [
        Entry(entry(kind, name), name, state.stepper.dtype)
        for name in trainable
        for kind in known[name].elements
    ]
    for flight in waiting:
        for kind, pieces in flight.by_age(0).items():
            own |= {kind + name: piece.detach() for name, piece in pieces.items()}
            entries += [Entry(kind + name, name, state.stepper.dtype) for name in trainable]
    left_out = state.strategy.residuals
    own |= {key: piece.detach() for key, piece in named(model, left_out).items()}
    entries += [
        Entry(residual_entry(use, replica, name), name, state.stepper.dtype, replica)
        for use in range(len(left_out))
        for name in trainable
        if reshard.residuals_kept(name)
        for replica in range(state.world.size // model.placements[name].group_size)
    ]
    numbers = _numbers(known, trainable, own, state.everyone)
    return move_pieces(reshard, entries, own, state.everyone), numbers


def _dropped(reshard: Reshard, model: CutModel, done: int) -> str:
    """What is to be said of residuals that have no place under the new plan."""
    names = [name for name in model.trainable() if reshard.residuals_kept(name) is False]
    if not names:
        return ""
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return (
        f"what codecs had left out of {', '.join(names[:_NAMED])}{more} before step {done} was "
        "dropped by a re-cut: no two ranks hold a part of them now, so that they are not encoded"
    )


def _left(flight: InFlight, moved: dict[str, Tensor]) -> InFlight:
    """The same gradients, in this rank's new pieces."""
    found = {
        kind: {
            key.removeprefix(kind): moved.pop(key) for key in list(moved) if key.startswith(kind)
        }
        for kind in flight.by_age(0)
    }
    gradients, *weights = found.values()
    return InFlight(flight.step, gradients, *weights)


def _numbers(
    known: Mapping[str, Remembered],
    names: Sequence[str],
    own: Mapping[str, Tensor],
    everyone: Group,
) -> dict[str, Tensor]:
    """The single numbers of each parameter, by entry: whoever holds a part tells all.

    None is negative, and all who know one know the same.
    """
    keys = [entry(kind, name) for name in names for kind in known[name].numbers]
    if not keys:
        return {}
    mine = torch.tensor([own[key].item() if key in own else 0.0 for key in keys])
    every = all_gather(mine[None], Shard(0, (1,) * everyone.size), everyone, layer="reshard")
    return dict(zip(keys, every.max(dim=0).values.unbind(), strict=True))


def _dtype(stated: str, floating: torch.dtype) -> torch.dtype:
    """Of a tensor in this run: floating-point ones are as wide as it is."""
    dtype = TORCH_DTYPES[stated]
    return floating if dtype.is_floating_point else dtype
