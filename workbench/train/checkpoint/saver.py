"""Writes checkpoints beside the steps that follow: each piece once, by one rank that holds it.

    rank 0     step 49 | copy | step 50 | step 51 | step 52 ...        (and so every rank)
    a thread                    write my part, with checksums
    rank 0's                                  ... all parts are there: index, name, remove old ones

A step waits for the copy alone, unless the checkpoint before is not whole yet. That one's name is
given once every rank's part is there; until then, and if anything fails, older ones are kept.
Threads issue no collectives: what went wrong in one is told to all ranks when they next meet here.
"""

import math
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from workbench.comm.all_reduce import all_reduce
from workbench.comm.collectives import all_gather
from workbench.comm.groups.group import Group
from workbench.layers.cut_model import CutModel
from workbench.model.errors import CheckpointError
from workbench.model.weights.pieces import Piece, Snapshot, index_pieces
from workbench.plan.experiment.experiment import Experiment
from workbench.plan.experiment.optimizers import Remembered
from workbench.plan.placement.flow import WeightPlacement
from workbench.plan.placement.placement import Shard
from workbench.store.run_folder import checkpoint_path
from workbench.train.checkpoint.checkpoint import (
    LOSS_SCALE,
    begin_folder,
    describe,
    latest,
    partial_path,
    prune,
    publish,
)
from workbench.train.optimizer.optimizer import Updater
from workbench.train.optimizer.state import entry
from workbench.train.step.state import InFlight, Residuals, named, residual_entry


@dataclass(frozen=True)
class Holding:
    """One piece of a logical tensor, and the ranks that hold it.

    Attributes:
        shard: how it is cut; None: the piece is the whole.
    """

    name: str
    shard: Shard | None
    index: int
    elements: int
    holders: tuple[int, ...]


def holdings(name: str, placed: WeightPlacement, world_size: int) -> list[Holding]:
    """The pieces of a logical tensor that lies like this, but for empty ones."""
    if not isinstance(placed.placement, Shard):
        return [Holding(name, None, 0, math.prod(placed.shape), tuple(range(world_size)))]
    k = placed.group_size
    return [
        Holding(name, placed.placement, p, placed.piece_numel(p), tuple(range(p, world_size, k)))
        for p, size in enumerate(placed.placement.sizes)
        if size > 0
    ]


def assign(pieces: Iterable[Holding], world_size: int) -> tuple[tuple[Holding, ...], ...]:
    """For each rank, the pieces that it writes: of what it holds, and about as much as others.

    The largest piece goes first (of equal ones, that with the fewest holders), always to the
    holder that writes least so far. Every rank computes the same answer from the plan, without
    communication.

    Source: the longest-processing-time rule (Graham 1969).
    """
    written = [0] * world_size
    chosen: list[list[Holding]] = [[] for _ in range(world_size)]
    for piece in sorted(pieces, key=_urgency):
        rank = min(piece.holders, key=lambda rank: (written[rank], rank))
        written[rank] += piece.elements
        chosen[rank].append(piece)
    return tuple(map(tuple, chosen))


def _urgency(piece: Holding) -> tuple[int, int, str, int]:
    return -piece.elements, len(piece.holders), piece.name, piece.index


Part = dict[str, Piece]
"""What one rank writes, by the name of the logical tensor that it is a piece of."""


def parts(
    step: int,
    model: CutModel,
    updater: Updater,
    *,
    in_flight: Sequence[InFlight] = (),
    residuals: Residuals = (),
) -> tuple[Part, tuple[str, ...]]:
    """This rank's part of a checkpoint, and the files that all ranks will write.

    Args:
        model: this rank's part; buffers that differ by rank (the statistics of a local batch norm)
            are to be made equal before.

    Returns:
        Pieces that show live tensors; by rank, the name of its file, "" where it writes none.
    """
    world, rank = model.plan.world_size, model.context.rank
    waiting = {what: pieces for each in in_flight for what, pieces in each.by_age(step).items()}
    every = _all_holdings(model, updater.remembered) + _waiting_holdings(model, waiting)
    every += residual_holdings(model, len(residuals))
    if updater.scaling is not None:
        every.append(Holding(LOSS_SCALE, None, 0, 2, tuple(range(world))))
    written = assign(every, world)
    files = tuple(f"rank-{rank:05d}.safetensors" if own else "" for rank, own in enumerate(written))
    tensors = model.pieces() | updater.state({held.name for held in written[rank]})
    tensors |= named(model, residuals)
    if updater.scaling is not None:
        tensors[LOSS_SCALE] = updater.scaling.state()
    for what, pieces in waiting.items():
        tensors |= {what + name: piece for name, piece in pieces.items()}
    return {held.name: _piece(held, tensors[held.name]) for held in written[rank]}, files


def _all_holdings(model: CutModel, remembered: Mapping[str, Remembered]) -> list[Holding]:
    """Every piece of every logical tensor, the same list on all ranks."""
    size, found = model.plan.world_size, []
    for name, placed in model.placements.items():
        found += holdings(name, placed, size)
    for name in model.trainable():
        pieces = holdings(name, model.placements[name], size)
        known = remembered[name]
        for state in known.names:
            if state in known.numbers:  # known to whoever holds a part of the parameter
                found.append(Holding(entry(state, name), None, 0, 1, pieces[0].holders))
            else:
                found += holdings(entry(state, name), model.placements[name], size)
    return found


def residual_holdings(model: CutModel, uses: int) -> list[Holding]:
    size, found = model.plan.world_size, []
    for name in model.trainable():
        k = model.placements[name].group_size
        replicas = size // k
        for piece in holdings(name, model.placements[name], size) if replicas > 1 else ():
            for use in range(uses):
                for replica in range(replicas):
                    holders = tuple(rank for rank in piece.holders if rank // k == replica)
                    entry = residual_entry(use, replica, name)
                    found.append(Holding(entry, piece.shard, piece.index, piece.elements, holders))
    return found


def _waiting_holdings(model: CutModel, kinds: Iterable[str]) -> list[Holding]:
    """The same of what is in flight, which lies as the parameters do."""
    size, placements = model.plan.world_size, model.placements
    return [
        holding
        for kind in kinds
        for name in model.trainable()
        for holding in holdings(kind + name, placements[name], size)
    ]


def _piece(held: Holding, tensor: Tensor) -> Piece:
    whole = list(tensor.shape)
    if held.shard is None:
        return Piece(tensor, tuple(whole))
    whole[held.shard.dim] = held.shard.extent
    start, _ = held.shard.span(held.index)
    return Piece(tensor, tuple(whole), held.shard.dim, start, held.shard.blocks)


def on_all_ranks(group: Group, action: Callable[[], object] | None) -> bool:
    """Runs this rank's action; returns once every rank's is over, whether all were done.

    One small all-reduce; the texts travel only where something failed.

    Args:
        action: what writes something, and returns False where it is to be called once more; None
            for a rank that only waits.

    Raises:
        CheckpointError: an action failed on some rank; raised on all, with each failed rank's
            own text.
    """
    problem, is_late = "", False
    try:
        is_late = action is not None and action() is False
    except (CheckpointError, OSError) as error:
        problem = str(error)
    text = torch.tensor(list(problem.encode()), dtype=torch.int64)
    lengths = torch.zeros(group.size, dtype=torch.int64)
    lengths[group.rank] = -1 if is_late else len(text)
    lengths = all_reduce(lengths, group, layer="checkpoint")
    if not (lengths > 0).any():
        return not lengths.any()
    lengths = lengths.clamp(min=0)
    texts = all_gather(text, Shard(0, tuple(lengths.tolist())), group, layer="checkpoint")
    raise CheckpointError(
        "; ".join(
            f"rank {rank}: {bytes(part.tolist()).decode()}"
            for rank, part in zip(group.ranks, texts.split(lengths.tolist()), strict=True)
            if len(part)
        )
    )


LOOK_EVERY_S = 0.005
# Ranks that wait for a disk meet so often: none is taken for lost because its disk is slow.
MEET_EVERY_S = 0.5


class Saver:
    """One rank's; every rank calls the same methods in the same order.

    Args:
        renew: is called again and again while a disk is waited for.

    Attributes:
        newest: the last checkpoint that is known to be complete; None: there was none yet.
    """

    def __init__(
        self,
        directory: Path,
        everyone: Group,
        *,
        keep: int = 2,
        renew: Callable[[], object] = lambda: None,
    ) -> None:
        self._directory, self._everyone, self._keep = directory, everyone, keep
        self._renew = renew
        self._snapshot = Snapshot()
        self._writing: _Writing | None = None
        self.newest: Path | None = None

    def begin(
        self,
        step: int,
        part: Part,
        files: tuple[str, ...],
        experiment: Experiment,
        best: int = 0,
    ) -> None:
        """Copies this rank's part, which may change as soon as this returns.

        Args:
            files: the files of all ranks, as `parts` gives them.
            best: the step whose checkpoint is kept, however old it is; 0: none.

        Raises:
            CheckpointError: a rank could not write this checkpoint or the one before, say because
                the disk is full. Raised on every rank; nothing is left of what is not complete,
                and older ones are all there.
        """
        self.finish()
        first = self._everyone.rank == 0
        try:
            begin = (lambda: begin_folder(self._directory, step)) if first else None
            on_all_ranks(self._everyone, begin)
        except CheckpointError as error:
            raise self._failed(step, error) from error
        self._snapshot.take(part)
        self._writing = _Writing(
            self._directory,
            step,
            self._snapshot,
            files,
            experiment,
            self._everyone.rank,
            self._keep,
            best,
        )

    def finish(self) -> None:
        """Returns once what was begun is complete; with nothing under way, at once.

        Raises:
            CheckpointError: as for `begin`.
        """
        writing = self._writing
        if writing is None:
            return
        first = self._everyone.rank == 0
        try:
            while not on_all_ranks(self._everyone, writing.wait_for_part):
                self._renew()
            while not on_all_ranks(self._everyone, writing.wait if first else None):
                self._renew()
        except CheckpointError as error:
            self.close()
            if first:
                shutil.rmtree(partial_path(self._directory, writing.step), ignore_errors=True)
            raise self._failed(writing.step, error) from error
        self._writing, self.newest = None, checkpoint_path(self._directory, writing.step)

    def close(self) -> None:
        """Ends without the others: what is not there of a checkpoint under way is given up."""
        if self._writing is not None:
            self._writing.give_up()
            self._writing = None

    def _failed(self, step: int, error: CheckpointError) -> CheckpointError:
        kept = latest(self._directory)
        where = f"the last checkpoint is {kept}" if kept else "there is no earlier checkpoint"
        return CheckpointError(f"no checkpoint at step {step}: {error}; {where}")


class _Writing:
    """One checkpoint on its way to the disk: a thread of one rank's."""

    def __init__(
        self,
        directory: Path,
        step: int,
        snapshot: Snapshot,
        files: tuple[str, ...],
        experiment: Experiment,
        rank: int,
        keep: int,
        best: int,
    ) -> None:
        self.step = step
        self._directory, self._part = directory, partial_path(directory, step)
        self._snapshot, self._experiment = snapshot, experiment
        self._keep, self._best = keep, best
        self._rank, self._own, self._files = rank, files[rank], [name for name in files if name]
        self._error: BaseException | None = None
        self._given_up, self._is_written = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"checkpoint {step}", daemon=True)
        self._thread.start()

    def wait_for_part(self) -> bool:
        """Waits for a while; whether this rank's part is written. Raises why it cannot be."""
        is_written = self._is_written.wait(MEET_EVERY_S)
        self._raise()
        return is_written

    def wait(self) -> bool:
        """Waits for a while; whether all is done. Raises why it cannot be."""
        self._thread.join(MEET_EVERY_S)
        self._raise()
        return not self._thread.is_alive()

    def give_up(self) -> None:
        """Ends the thread; what it needs for a complete checkpoint and is there, it takes.

        One that still waits for the disk is not waited for: whoever lost a rank is to be free at
        once. It leaves nothing, and touches nothing that comes after it.
        """
        self._given_up.set()
        if self._is_written.is_set():
            self._thread.join()

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            if self._own:
                self._snapshot.write(self._part / self._own, lambda: not self._given_up.is_set())
            self._is_written.set()
            if self._rank == 0 and self._are_all_there():
                self._publish()
        except BaseException as error:  # raised where it is waited for
            self._error = error
        finally:
            self._is_written.set()

    def _are_all_there(self) -> bool:
        """Waits for the other ranks' parts: each has its name once it is whole."""
        while not all((self._part / name).exists() for name in self._files):
            if self._given_up.is_set():
                return False
            time.sleep(LOOK_EVERY_S)
        return True

    def _publish(self) -> None:
        index_pieces(self._part, self._files)
        describe(self._part, self.step, self._experiment)
        publish(self._directory, self.step)
        prune(self._directory, self.step, self._keep, self._best)
