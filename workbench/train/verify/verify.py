"""Holds one rank of the split model against what one process computed."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from workbench.comm.groups.world import RankConfig, World
from workbench.layers.cut_model import RankGroups
from workbench.model.weights.slices import WeightsFile
from workbench.plan.experiment.experiment import Experiment
from workbench.plan.io.files import write_whole
from workbench.plan.placement.placement import Replicate, Shard
from workbench.plan.plans.plan import Plan
from workbench.train.checkpoint.saver import Saver, parts
from workbench.train.data.collated import Batch
from workbench.train.data.datasets import Dataset
from workbench.train.data.reading import EVALUATION
from workbench.train.optimizer.rules import is_of_strategy
from workbench.train.optimizer.state import entry
from workbench.train.run.loop import agree
from workbench.train.run.rank import RankState, group_specs_of
from workbench.train.run.reshard import under
from workbench.train.run.scoring import evaluate
from workbench.train.step.executor import StepResult
from workbench.train.step.loss import OwnLoss, Seen, average_statistics, own_rows
from workbench.train.verify.verification import TOLERANCE, Difference
from workbench.train.verify.whole_model import Weights, write_reference

__all__ = ["compare", "write_reference"]

# A gradient counts as no smaller than this part of the largest in the model.
FLOOR = 1e-3
PART = 2**22  # elements


def compare(
    config: RankConfig, experiment: Experiment, **given: Any
) -> tuple[list[Difference], Seen | None]:
    """As `compare_in`, in a world of its own."""
    with World.open(config) as world:
        return compare_in(world, experiment, **given)


def compare_in(
    world: World, experiment: Experiment, *, weights: Path, reference: Path, repeat: bool = True
) -> tuple[list[Difference], Seen | None]:
    """Trains this rank's part as one process did, and compares.

    Args:
        reference: the entries that it wrote.
        repeat: whether to train twice, which is to leave the same bits.

    Returns:
        One difference for each output, and for each gradient, weight, buffer and state of the
        optimizer held here, for what evaluation gives, and for what a second run leaves; and the
        range in which a loss of the user's own was tried meanwhile.
    """
    whole = WeightsFile(reference)
    with _full_precision():
        run = _Run(experiment, world, weights)
        state, found = run.start(), []
        for step in range(experiment.steps):
            result = state.stepper.run(step)
            if step == 0:
                found += _outputs(state, result, whole)
                found += _gradients(state, whole)
            state.stepper.update()
        found += _values(run.ended(state), whole)
        found += _optimizer(state, whole)
        left = {name: piece.detach().clone() for name, piece in state.model.pieces().items()}
        found += _evaluation(state, whole)
        seen = state.loss.seen if isinstance(state.loss, OwnLoss) else None
        if repeat:
            del state
            found += _repeated(run, left)
        return found, seen


def compare_into(config: RankConfig, experiment: Experiment, found: Path, **given: Any) -> None:
    """The same, written into a file: of a large model, it is too much for a message."""
    differences, seen = compare(config, experiment, **given)
    content = {
        "differences": list(map(asdict, differences)),
        "seen": None if seen is None else asdict(seen),
    }
    write_whole(Difference.file(found, config.rank), json.dumps(content))


@contextmanager
def _full_precision() -> Iterator[None]:
    """Has convolutions on GPUs compute fp32 in fp32.

    cuDNN's default is TF32, whose 10 bits round by more than a split may differ.
    """
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32 = before


@dataclass(frozen=True)
class _Run:
    """What is trained here, once or twice."""

    experiment: Experiment
    world: World
    weights: Path

    @cached_property
    def groups(self) -> RankGroups:
        return self.world.groups(group_specs_of(self.experiment.plan))

    def start(self) -> RankState:
        """This rank's part before the first step."""
        return RankState.start(self.experiment, self.world, self.groups, self.weights, None)

    def ended(self, state: RankState) -> RankState:
        """The same after the last step, when ranks that hold the same piece are made equal."""
        state.stepper.feed.close()
        state.strategy.settle()
        average_statistics(state.model)
        return state


def _outputs(state: RankState, result: StepResult, whole: WeightsFile) -> list[Difference]:
    """Of several micro-batches, those of the last."""
    model, rank, last = state.model, state.world.rank, result.batches[-1]
    rows = Shard(0, (last.first_row, *last.rows))  # the others lie before them
    found = []
    for index, name in enumerate(model.plan.graph.outputs):
        with torch.no_grad():
            mine = own_rows(model, name, result.outputs[index])
        what = f"output/{index}"
        scale = _scale(whole, what)
        error = _error(mine, whole.read(what, rows, 1 + rank), scale)
        found.append(Difference("output", name, rank, error, _rounding(whole, what, scale)))
    return found


def _gradients(state: RankState, whole: WeightsFile) -> list[Difference]:
    """Where one process has no gradient, there is nothing to compare, and none to be had."""
    found, none = {}, []
    for name, parameter in state.model.trainable().items():
        mine = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        if f"gradient/{name}" in whole.names:
            found[name] = mine
        elif mine.any():
            none.append(Difference("gradient", name, state.world.rank, float("inf")))
    return none + _compared(state, whole, "gradient", found, FLOOR)


def _values(state: RankState, whole: WeightsFile) -> list[Difference]:
    pieces = state.model.pieces()
    parameters = {name for name, piece in pieces.items() if isinstance(piece, nn.Parameter)}
    weights = {name: piece.detach() for name, piece in pieces.items() if name in parameters}
    buffers = {name: piece for name, piece in pieces.items() if name not in parameters}
    found = _compared(state, whole, "weight", weights, 1.0)
    return found + _compared(state, whole, "buffer", buffers, 1.0)


def _optimizer(state: RankState, whole: WeightsFile) -> list[Difference]:
    """Everything that is remembered; one kind of it (squares, say) is not measured by another."""
    known = state.updater.remembered
    held = state.updater.state({entry(kind, name) for name in known for kind in known[name].names})
    found = []
    for kind in dict.fromkeys(kind for one in known.values() for kind in one.names):
        if is_of_strategy(kind):  # one process has no strategy
            continue
        mine = {name: held[entry(kind, name)] for name in known if entry(kind, name) in held}
        number = any(kind in one.numbers for one in known.values())
        found += _compared(state, whole, "optimizer", mine, 1.0, kind, is_number=number)
    return found


def _evaluation(state: RankState, whole: WeightsFile) -> list[Difference]:
    """The first test batch, as runs evaluate all of them; the largest of the two is about 1."""
    if "evaluation/loss" not in whole.names or state.test_data is None:
        return []
    size, everyone = state.experiment.batch_size, state.everyone
    data = _First(state.test_data, size)
    world, dtype = state.world, state.stepper.dtype
    with state.updater.averaged():
        mine = evaluate(state.model, data, size, everyone, world.device, dtype, state.scoring)
    found = []
    for name, value in mine.items():
        what = f"evaluation/{name}"
        scale = max(1.0, _scale(whole, what))
        error = _error(torch.tensor(value, dtype=torch.float64), whole.read(what), scale)
        rounding = _rounding(whole, what, scale)
        found.append(Difference("evaluation", name, world.rank, error, rounding))
    return found


class _First:
    def __init__(self, data: Dataset, length: int) -> None:
        self.num_classes, self._data, self._length = data.num_classes, data, length

    def __len__(self) -> int:
        return min(self._length, len(self._data))

    def batch(self, indices: Tensor, epoch: int = EVALUATION) -> Batch:
        return self._data.batch(indices, epoch)


def _repeated(run: _Run, left: Mapping[str, Tensor]) -> list[Difference]:
    """The same steps again, from the same start: every bit of weights and buffers."""
    state = run.start()
    for step in range(run.experiment.steps):
        state.stepper.run(step)
        state.stepper.update()
    run.ended(state)
    # The kernels of an accelerator need not add in the same order twice.
    device = run.world.device
    allowed = 0.0 if device.type == "cpu" else TOLERANCE[run.experiment.precision]
    found = []
    for name, again in state.model.pieces().items():
        scale = float(left[name].double().abs().max()) if left[name].numel() else 0.0
        error = 0.0 if torch.equal(again, left[name]) else _error(again, left[name].cpu(), scale)
        found.append(Difference("repeat", name, run.world.rank, error, allowed))
    return found


def _compared(
    state: RankState,
    whole: WeightsFile,
    what: str,
    pieces: Mapping[str, Tensor],
    floor: float,
    kind: str = "",
    *,
    is_number: bool = False,
) -> list[Difference]:
    """This rank's pieces of one kind against the slices of the whole tensors.

    A tensor counts as no smaller than `floor` times the largest of its kind in the model. Of a
    single number every rank has the whole.
    """
    before = f"{kind}/" if kind else ""
    scales = {name: _scale(whole, f"{what}/{before}{name}") for name in pieces}
    least = floor * max(scales.values(), default=0.0)
    found, rank = [], state.world.rank
    for name, piece in pieces.items():
        placed = state.model.placements[name]
        whole_here = isinstance(placed.placement, Replicate) or is_number
        cut = None if whole_here else cast(Shard, placed.placement)
        where, scale = f"{what}/{before}{name}", max(least, scales[name])
        error = _error(piece, whole.read(where, cut, rank % placed.group_size), scale)
        rounding = _rounding(whole, where, scale)
        found.append(Difference(what, before + name, rank, error, rounding))
    return found


def _scale(whole: WeightsFile, what: str) -> float:
    return float(whole.read(f"scale/{what}"))


def _rounding(whole: WeightsFile, what: str, scale: float) -> float:
    """What rounding alone does to the whole model's tensor, as `_error` measures it."""
    name = f"rounding/{what}"
    off = float(whole.read(name)) if name in whole.names else 0.0
    return _relative(off, scale)


def _error(mine: Tensor, expected: Tensor, scale: float) -> float:
    """Max |mine - expected| / scale; of equal infinities, and for 0 / 0, 0; infinite for a NaN."""
    if mine.shape != expected.shape:
        return float("inf")
    off = 0.0
    parts = zip(_parts(mine.detach()), _parts(expected), strict=True)
    for a, b in parts:
        ours, theirs = a.double().cpu(), b.double()
        difference = (ours - theirs).abs_().masked_fill_(ours == theirs, 0.0).max().item()
        if difference != difference:
            return float("inf")
        off = max(off, difference)
    return _relative(off, scale)


def _parts(tensor: Tensor) -> tuple[Tensor, ...]:
    """A tensor in parts of a size that can be copied without a thought for memory."""
    return tensor.reshape(-1).split(PART) if tensor.numel() else ()


def _relative(off: float, scale: float) -> float:
    if off == 0.0:
        return 0.0
    return off / scale if off == off and scale > 0 else float("inf")


_CLOSE = 1e-9

Rows = tuple[tuple[str, str, str, str, int, int, int], ...]


@dataclass(frozen=True)
class Observed:
    """What one rank saw.

    Attributes:
        digests: the digest of its weights after each step in which replicas are to be equal; else
            "".
        goes_on: whether a run that resumed from a checkpoint left the same bits as the run that
            wrote it; and, where gradients are exchanged, whether that run left the same weights as
            one without checkpoints.
        resharded: whether the pieces under another plan were of the same weights and states.
    """

    traffic: tuple[Rows, ...]
    digests: tuple[str, ...]
    weights: Mapping[str, Any]
    goes_on: bool
    resharded: bool


def observed(
    config: RankConfig,
    experiment: Experiment,
    weights: Path,
    directory: Path,
    cut: str,
    saved_after: int,
) -> Observed:
    """Trains under a plan that has all weights on each rank; every rank calls it."""
    with World.open(config) as world:
        groups = world.groups(group_specs_of(experiment.plan))

        def started(resume: Path | None = None) -> RankState:
            return RankState.start(experiment, world, groups, weights, resume)

        state, traffic, digests = started(), list[Rows](), list[str]()
        for step in range(experiment.steps):
            world.recorder.reset()
            _step(state, step)
            state.strategy.rest()
            traffic.append(tuple(row.counts for row in world.recorder.rows()))
            digests.append(_digest(state) if state.strategy.is_settled else "")
        found = _ended(state)

        state = started()
        _steps(state, range(saved_after))
        state.strategy.settle()
        saver = Saver(directory, state.everyone)
        strategy = state.strategy
        part, files = parts(
            saved_after,
            state.model,
            state.updater,
            in_flight=strategy.in_flight,
            residuals=strategy.residuals,
        )
        saver.begin(saved_after, part, files, experiment)
        saver.finish()
        _steps(state, range(saved_after, experiment.steps))
        went_on, resumed = _ended(state), started(saver.newest)
        _steps(resumed, range(saved_after, experiment.steps))
        again = _ended(resumed)
        saver.close()

        state = started()
        _steps(state, range(saved_after))
        state.strategy.settle()
        before = _remembered(state)
        after = under(state, Plan.from_toml(cut), saved_after)
        resharded = _are_pieces(after, before)
        after.stepper.feed.close()
    goes_on = all(torch.equal(again[name], tensor) for name, tensor in went_on.items())
    if not experiment.sync.timing.of_weights:
        both = zip(went_on.values(), found.values(), strict=True)
        goes_on &= all(torch.allclose(a, b, rtol=_CLOSE, atol=_CLOSE) for a, b in both)
    listed = {name: tensor.tolist() for name, tensor in found.items()}
    return Observed(tuple(traffic), tuple(digests), listed, goes_on, resharded)


def _steps(state: RankState, steps: range) -> None:
    for step in steps:
        _step(state, step)


def _step(state: RankState, step: int) -> None:
    result = state.stepper.run(step)
    agree(state.everyone, result.loss, False, result.blocked_s)
    state.stepper.update()


def _ended(state: RankState) -> Weights:
    state.strategy.settle()
    state.stepper.feed.close()
    return {name: piece.detach().clone() for name, piece in state.model.pieces().items()}


def _digest(state: RankState) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for piece in state.model.pieces().values():
        digest.update(piece.detach().cpu().numpy().tobytes())
    return digest.hexdigest()


def _remembered(state: RankState) -> Weights:
    """This rank's pieces of weights, and of what is remembered of each element."""
    known = state.updater.remembered
    names = {entry(kind, name) for name in known for kind in known[name].elements}
    held = state.updater.state(names)
    pieces = state.model.pieces() | {name: held[name] for name in names if name in held}
    return {name: piece.detach().clone() for name, piece in pieces.items()}


def _are_pieces(state: RankState, whole: Weights) -> bool:
    found = _remembered(state)
    for name, piece in found.items():
        placed = state.model.placements[name.split("/", 2)[-1]]
        expected = whole[name]
        if isinstance(placed.placement, Shard):
            span = placed.placement.span(state.world.rank % placed.group_size)
            expected = expected.narrow(placed.placement.dim, *span)
        if not torch.equal(piece, expected):
            return False
    return True


Piece = tuple[str, Any, tuple[int, int, int] | None]
"""A weight's name, this rank's values, and (dim, start, length) of them; None: all."""


def cut_weights(config: RankConfig, experiment: Experiment, weights: Path) -> list[Piece]:
    """This rank's weights in the end, under any plan; every rank calls it."""
    found: list[Piece] = []
    with World.open(config) as world:
        groups = world.groups(group_specs_of(experiment.plan))
        state = RankState.start(experiment, world, groups, weights, None)
        _steps(state, range(experiment.steps))
        placements = state.model.placements
        for name, piece in _ended(state).items():
            placed, span = placements[name], None
            if isinstance(placed.placement, Shard):
                index = world.rank % placed.group_size
                span = (placed.placement.dim, *placed.placement.span(index))
            found.append((name, piece.tolist(), span))
    return found
