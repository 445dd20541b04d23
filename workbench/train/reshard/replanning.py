"""A run goes on under another plan: at a step's end, with all that it has learnt.

    on the way      weights, buffers, the optimizer's state, gradients in flight, what codecs have
                    left out of gradients: what changes hands, and nothing else
    built anew      this rank's part of the model, its optimizer, its strategy's buckets
    dropped         what codecs have left out of parameters that no two ranks hold now: nothing of
                    theirs is encoded any more; the run notes it
    as before       the data and its order, the step, the seed

The run that goes on is the one that would have been resumed from a checkpoint at this step.
"""

from collections.abc import Mapping, Sequence
from copy import deepcopy

import torch
from torch import Tensor

from workbench.comm.collectives import all_gather
from workbench.comm.groups.group import Group
from workbench.comm.groups.record import Recorder
from workbench.layers.context import BatchContext
from workbench.layers.cut import cut
from workbench.layers.cut_model import CutModel
from workbench.plan.placement import Shard
from workbench.plan.plan import Plan
from workbench.plan.recut import Recut
from workbench.train.checkpoint.in_flight import InFlight
from workbench.train.checkpoint.residuals import RESIDUAL, named, residual_entry, restore_residuals
from workbench.train.checkpoint.statistics import average_statistics
from workbench.train.loop.state import RankState, groups_for
from workbench.train.loop.step import Stepper
from workbench.train.reshard.reshard import RECUT, Entry, Pieces, move_pieces
from workbench.train.strategies.optimizer import entry, state_names
from workbench.train.strategies.strategy import strategy_of, updater_of

_NAMED = 3  # parameters, in a note


def under(state: RankState, plan: Plan, done: int) -> RankState:
    """A rank's part of the run under another plan; every rank calls it after the same step.

    Args:
        state: as it is; not to be used afterwards.
        plan: of the same model and world size.
        done: steps made so far.

    Raises:
        PlanError: the plan is of another model or world size.
        ExperimentError: it leaves a rank too few rows of some batch for a layer.
        CommError: a rank is gone; the run goes on from its last checkpoint.
    """
    recut = Recut(state.experiment.plan, plan)
    experiment = state.experiment.replace(plan=plan)
    experiment.check_rows((len(state.stepper.data), len(state.test_data)))
    state.strategy.settle()
    average_statistics(state.model)
    waiting = state.strategy.in_flight
    moved, counts = _moved(state, recut, waiting)
    world, dtype = state.world, state.stepper.dtype
    groups, asked = groups_for(plan, recut.before, world, state.groups, state.asked)
    context = BatchContext(world.rank, (0,) * world.size, seed=experiment.seed)
    reader = Pieces(plan.flow.weights, moved)
    traced, device = deepcopy(state.traced), world.device
    model = cut(plan, context, groups, reader, device=device, dtype=dtype, traced=traced)
    updater = updater_of(experiment, model)

    def read(kept: str, name: str) -> Tensor:
        return counts[name] if kept == "step" else moved.pop(entry(kept, name))

    updater.load(read)
    left = [_left(flight, moved) for flight in waiting]
    strategy = strategy_of(experiment, model, updater, done, left, state.notes)
    left_out = {key: moved.pop(key) for key in list(moved) if key.startswith(RESIDUAL)}
    restore_residuals(Pieces(plan.flow.weights, left_out), model, strategy.residuals)
    if state.strategy.residuals and (note := _dropped(recut, model, done)):
        state.notes.append(note)
    return RankState(
        experiment=experiment,
        world=world,
        everyone=state.everyone,
        model=model,
        updater=updater,
        strategy=strategy,
        stepper=Stepper(experiment, model, strategy, state.stepper.data, world, dtype),
        test_data=state.test_data,
        traced=state.traced,
        groups=groups,
        asked=asked,
        first_step=done,
        notes=state.notes,
    )


def recut_bytes(recorder: Recorder) -> int:
    """What re-cuts have brought to this rank so far."""
    rows = recorder.rows()
    return sum(row.bytes for row in rows if (row.op, row.layer) == ("all_to_all", RECUT))


def _moved(
    state: RankState, recut: Recut, waiting: Sequence[InFlight]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """This rank's new pieces by entry, and the updates that each parameter has had."""
    value, model = state.experiment.optimizer, state.model
    trainable = tuple(model.trainable())
    kept = [name for name in state_names(value) if name != "step"]
    wanted = {entry(kind, name) for kind in state_names(value) for name in trainable}
    own: dict[str, Tensor] = model.pieces() | state.updater.state(wanted)
    own = {key: tensor.detach() for key, tensor in own.items()}
    entries = [
        Entry(name, name, _dtype(placed.dtype, state.stepper.dtype))
        for name, placed in model.placements.items()
    ]
    entries += [
        Entry(entry(kind, name), name, state.stepper.dtype) for name in trainable for kind in kept
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
        if recut.residuals_kept(name)
        for replica in range(state.world.size // model.placements[name].group_size)
    ]
    counts = {}
    if "step" in state_names(value):
        counts = _counts({name: own.get(entry("step", name)) for name in trainable}, state.everyone)
    return move_pieces(recut, entries, own, state.everyone), counts


def _dropped(recut: Recut, model: CutModel, done: int) -> str:
    """What is to be said of residuals that have no place under the new plan."""
    names = [name for name in model.trainable() if recut.residuals_kept(name) is False]
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


def _counts(known: Mapping[str, Tensor | None], everyone: Group) -> dict[str, Tensor]:
    """Updates of each parameter: known to whoever holds a part of it, told to all."""
    mine = torch.tensor([0.0 if n is None else n.item() for n in known.values()])
    every = all_gather(mine[None], Shard(0, (1,) * everyone.size), everyone, layer="recut")
    return dict(zip(known, every.max(dim=0).values.unbind(), strict=True))


def _dtype(stated: str, floating: torch.dtype) -> torch.dtype:
    """Of a tensor in this run: floating-point ones are as wide as it is."""
    dtype: torch.dtype = getattr(torch, stated)
    return floating if dtype.is_floating_point else dtype
