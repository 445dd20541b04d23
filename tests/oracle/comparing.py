"""One comparison for every kind of run: the library's, on ranks, against one process."""

import math
import re
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.oracle import oracle
from tests.oracle.cases import REFUSALS, Case, graph_of, optimizer_of
from tests.oracle.draws import NotSpecifiedError
from tests.oracle.oracle import Batch, Step, Task
from tests.oracle.running import Leg, Ranks, Seen, on
from workbench.model.weights import initialize
from workbench.plan.experiment import (
    Experiment,
    LocalSGD,
    Pipelined,
    Synchronous,
)
from workbench.plan.placement import Shard, apportion
from workbench.plan.plan import Plan
from workbench.plan.weights import WeightPlacement
from workbench.train.checkpoint.full_state_dict import state_dict
from workbench.train.data.data import open_data, rows_of_step
from workbench.train.reshard.requests import RunRequests

EXACT, MARGIN = 1e-9, 10.0
# One may move by chance as little as nothing does.
_SHAKES = 3
SHAKEN = {"fp64": 1e-14, "fp32": 1e-6, "bf16": 4e-3}
# No wrong factor is as small, whatever the rounding: of fp32, and of bf16.
# Adam's first steps are the gradient's sign: in bf16, rounding may turn it, by twice lr = 0.01.
LEAST = {"fp64": EXACT, "fp32": 1e-4, "bf16": 3e-2}
MOST = {"fp64": 1e-3, "fp32": 0.24, "bf16": 0.5}
# A tensor counts as no smaller than this part of the largest of its kind.
FLOOR = {"output": 1.0, "gradient": 1e-3, "weight": 1.0, "buffer": 1e-3, "state": 1e-3}
AUXILIARY = 0.3


@dataclass(frozen=True)
class Verdict:
    """What became of a case: "equal", "refused", "wrong" or, where torch refuses, "invalid"."""

    what: str
    why: str = ""

    @property
    def right(self) -> bool:
        return self.what != "wrong"


def judged(case: Case, ranks: Ranks) -> Verdict:
    """Runs a case in both ways, and says whether they agree.

    Args:
        case: what to run.
        ranks: runs a function on seats, as `tests.ranks.Ranks.seated` does.
    """
    if case.net.runs() is None:
        return Verdict("invalid", "torch itself does not run it")
    try:
        experiment = case.run.of(case.cut.of(graph_of(case.net)))
        then = case.cut if case.then is None else case.then
        after = case.run.of(then.of(graph_of(case.net)))
    except REFUSALS as error:
        return _refused(error)
    except Exception as error:
        return Verdict("wrong", f"bare {type(error).__name__} before it runs: {error}")
    try:
        if Experiment.from_toml(experiment.to_toml()) != experiment:
            return Verdict("wrong", "the experiment is another one when it is read again")
        expected = Expected(case, experiment, after)
    except REFUSALS as error:
        return Verdict("wrong", f"the experiment cannot be read again: {error}")
    except NotSpecifiedError as error:
        return Verdict("wrong", f"accepted, though {error}")
    except (ValueError, RuntimeError) as error:
        if not case.cut.local or experiment.precision == "bf16":
            return Verdict("invalid", f"torch itself says {type(error).__name__}: {error}")
        return Verdict("wrong", f"accepted, though torch says {type(error).__name__}: {error}")
    with tempfile.TemporaryDirectory() as folder:
        try:
            differences = list(_differences(case, experiment, after, expected, ranks, Path(folder)))
            for seed in range(_SHAKES if experiment.precision == "fp64" else 0):
                if not differences:
                    break
                expected.shaken(seed)
                again = Path(folder) / f"shaken-{seed}"
                again.mkdir()
                differences = list(_differences(case, experiment, after, expected, ranks, again))
            if differences and experiment.precision != "fp64" and expected.is_decided_by_rounding():
                return Verdict("invalid", "torch's own result is decided by rounding")
        except Exception as error:
            said = str(error).strip().splitlines() or [""]
            return Verdict("wrong", f"{type(error).__name__} while it runs: {said[0][:500]}")
    return Verdict("wrong", "; ".join(differences[:6])) if differences else Verdict("equal")


# Where it is: a line, a layer, or a field; and what to do: a verb that says so.
PLACE = re.compile(r"<net \w+>:\d+|layer '|'\w+(\.\w+)*'|^\w+: ")
REMEDY = re.compile(
    r"\b(use|build|keep|give|name|put|write|return|declare|call|make|pass|register|take|draw|set|"
    r"choose|valid|instead|rename|train|freeze|leave|say|built)\b"
)
BARE = re.compile(
    r": (Runtime|Assertion|Key|Attribute|Index|Value|NotImplemented|ZeroDivision)Error\b"
)


def _refused(error: Exception) -> Verdict:
    """Whether an error of the library says enough: where, why, and what to do."""
    text = str(error)
    if BARE.search(text):
        return Verdict("wrong", f"refused for an error of torch alone: {text}")
    if not PLACE.search(text):
        return Verdict("wrong", f"refused, but where? {text}")
    if not REMEDY.search(text):
        return Verdict("wrong", f"refused without a remedy: {text}")
    return Verdict("refused", text)


class Expected:
    """What one process computes of a case."""

    def __init__(self, case: Case, experiment: Experiment, after: Experiment) -> None:
        self.case, self.experiment = case, experiment
        self.module = case.net.build()
        self.names = _names(self.module)
        batches, test = _batches(case, experiment, after)
        self.task = self._task(case, experiment, batches, test)
        self.steps = self._trained(self.module, self.task)
        self.rounded: list[Step] = []
        if experiment.precision != "fp64":
            wide = replace(self.task, precision="fp64")
            self.rounded = self._trained(case.net.build(), wide)

    def shaken(self, seed: int) -> None:
        """Finds out what rounding does to this case: its inputs move by as much as rounding does.

        A gradient that is zero but for rounding is divided by itself in Adam; what is beside a
        kink falls to the other side.
        """
        self.rounded = self._moved("fp64", seed)

    def is_decided_by_rounding(self) -> bool:
        """Whether inputs that move by rounding move the gradients by what a wrong one would.

        Batch norm over two samples that are nearly equal divides their difference by itself.
        """
        precision = self.experiment.precision
        for step, *others in zip(self.steps, self.rounded, self._moved(precision), strict=True):
            known = {name: g for name, g in step.gradients.items() if g is not None}
            largest = max(map(_largest, known.values()), default=0.0)
            for other in others:
                pairs = ((g.double(), other.gradients[name]) for name, g in known.items())
                apart = max((_largest(a - b.double()) for a, b in pairs if b is not None),
                            default=0.0)  # fmt: skip
                if apart > MOST[precision] * largest:
                    return True
        return False

    def _moved(self, precision: str, seed: int = 0) -> list[Step]:
        """The steps of inputs that are other by rounding."""
        generator = torch.Generator().manual_seed(seed)

        def moved(x: Tensor) -> Tensor:
            noise = torch.randn(x.shape, generator=generator, dtype=torch.float64)
            wide = x.double() * (1.0 + SHAKEN[precision] * noise)
            return wide if precision == "fp64" else wide.to(x.dtype)

        batches = [replace(batch, inputs=moved(batch.inputs)) for batch in self.task.batches]
        return self._trained(self.case.net.build(), replace(self.task, batches=batches))

    def _trained(self, module: nn.Module, task: Task) -> list[Step]:
        if task.precision == "fp64":
            module.double()
        return oracle.train(module, task)

    def _task(
        self,
        case: Case,
        experiment: Experiment,
        batches: list[Batch],
        test: tuple[Tensor, Tensor],
    ) -> Task:
        graph, sync, plan = experiment.plan.graph, experiment.sync, experiment.plan
        late = isinstance(sync, Pipelined)
        norms = [layer.name for layer in graph.layers if layer.kind == "batch_norm"]
        local = {name.partition("@")[0]: plan.flow.inputs[name].group_size for name in norms}
        return Task(
            optimizer=optimizer_of(experiment),
            outputs=case.net.outputs,
            loss=mean_loss,
            batches=batches,
            test=test,
            test_ranks=[
                plan.rows_of(min(experiment.batch_size, len(test[1]) - first))
                for first in range(0, len(test[1]), experiment.batch_size)
            ],
            precision=experiment.precision,
            accumulate=experiment.accumulate,
            seed=experiment.seed,
            draws={layer.name: layer.draws for layer in graph.layers if layer.draws},
            local=local if plan.batch_norm == "local" else {},
            late=sync.width - 1 if late else 0,
            warmup=sync.warmup if late else 0,
        )


def mean_loss(outputs: tuple[Tensor, ...], labels: Tensor) -> Tensor:
    """Cross-entropy of the first output, and of the others as auxiliary heads."""
    wide = [o.float() if o.dtype == torch.bfloat16 else o for o in outputs]
    loss = F.cross_entropy(wide[0], labels)
    for auxiliary in wide[1:]:
        loss = loss + AUXILIARY * F.cross_entropy(auxiliary, labels)
    return loss


def _batches(
    case: Case, experiment: Experiment, after: Experiment
) -> tuple[list[Batch], tuple[Tensor, Tensor]]:
    """The rows of every step and of the evaluation, from the public data set."""
    shape, classes = case.net.shape, experiment.plan.graph.num_classes
    data = open_data(experiment.data, shape, classes, "train")
    test = open_data(experiment.data, shape, classes, "test")
    found = []
    for step in range(experiment.steps):
        order = rows_of_step(len(data), experiment.batch_size, experiment.seed, step)
        plan = (experiment if step == 0 or case.way in ("straight", "again") else after).plan
        counts = filter(None, apportion(len(order), (1,) * experiment.accumulate))
        found.append(Batch(*data.batch(order), ranks=tuple(map(plan.rows_of, counts))))
    return found, test.batch(torch.arange(len(test)))


def _names(module: nn.Module) -> dict[str, str]:
    """For every name of a parameter or buffer, the one under which torch lists it."""
    found: dict[str, str] = {}
    for listed in (nn.Module.named_parameters, nn.Module.named_buffers):
        first = {id(tensor): name for name, tensor in listed(module)}
        found |= {n: first[id(t)] for n, t in listed(module, remove_duplicate=False)}
    return found


def _differences(
    case: Case,
    experiment: Experiment,
    after: Experiment,
    expected: Expected,
    ranks: Ranks,
    folder: Path,
) -> Iterator[str]:
    """What differs, in words."""
    module = case.net.build()
    weights = initialize(experiment.plan.graph, experiment.seed, folder, module=module)

    def leg(name: str, what: Experiment, resume: Path | None = None, stop: bool = False) -> Leg:
        (folder / name).mkdir(exist_ok=True)
        return Leg(what, weights, folder / name, resume, stop)

    plans = [experiment.plan] * experiment.steps
    if case.way == "resumed":
        first, outcome = on(ranks, leg("run", experiment, stop=True))
        yield from _stopped(first, outcome.step, experiment)
        assert outcome.checkpoint is not None
        rest, outcome = on(ranks, leg("run", after, Path(outcome.checkpoint)))
        seen = first + rest
        plans = [experiment.plan] + [after.plan] * (experiment.steps - 1)
    elif case.way == "re-cut":
        first_leg = leg("run", experiment)
        RunRequests(first_leg.directory).wish(after.plan)
        seen, outcome = on(ranks, first_leg)
        plans = [experiment.plan] + [after.plan] * (experiment.steps - 1)
    else:
        seen, outcome = on(ranks, leg("run", experiment))
    if len(seen) != experiment.steps:
        if outcome.reason != "diverged" or math.isfinite(expected.steps[len(seen)].loss):
            yield f"{len(seen)} steps of {experiment.steps}: {outcome.message}"
        return
    for step, plan, found in zip(expected.steps, plans, seen, strict=True):
        yield from Compared(expected, plan, found, step).all()
    assert outcome.checkpoint is not None
    yield from _taken_home(case, plans[-1], seen[-1], Path(outcome.checkpoint))
    if case.way == "again" or (case.way == "resumed" and case.then is None):
        again, _ = on(ranks, leg("again", experiment))
        yield from _unequal_bits(case.way, seen, again)


def _stopped(first: list[list[Seen]], step: int, experiment: Experiment) -> Iterator[str]:
    if experiment.steps > 1 and (len(first), step) != (1, 1):
        yield f"asked to stop before its first step, it made {step}"


def _unequal_bits(way: str, seen: list[list[Seen]], again: list[list[Seen]]) -> Iterator[str]:
    for index, (ones, others) in enumerate(zip(seen, again, strict=True)):
        for rank, (one, other) in enumerate(zip(ones, others, strict=True)):
            for name in one.pieces:
                if not torch.equal(one.pieces[name], other.pieces[name]):
                    yield f"{way}: other bits in {name} on rank {rank} after step {index}"
                    return


class Compared:
    """One step of all ranks against the same step of one process."""

    def __init__(self, expected: Expected, plan: Plan, found: list[Seen], step: Step) -> None:
        self.expected, self.plan, self.found, self.step = expected, plan, found, step
        self.experiment = expected.experiment
        self.index = found[0].step
        self.wide = expected.rounded[self.index] if expected.rounded else None
        self.alike = plan.batch_norm != "local" or found[0].evaluation is not None

    def all(self) -> Iterator[str]:
        sync = self.experiment.sync
        yield from self._outputs()
        yield from self._loss()
        if isinstance(sync, Synchronous | Pipelined) and not self.experiment.fused:
            if not (isinstance(sync, Pipelined) and sync.width > 1):
                yield from self._gradients()
        if isinstance(sync, LocalSGD) and not self._averaged(sync):
            return
        yield from self._values("weight", self.step.weights, self.wide and self.wide.weights)
        yield from self._values("buffer", self.step.buffers, self.wide and self.wide.buffers)
        if not isinstance(sync, LocalSGD):
            yield from self._state()
        yield from self._evaluation()

    def _averaged(self, sync: LocalSGD) -> bool:
        return (self.index + 1) % sync.every == 0 or self.index == self.experiment.steps - 1

    def _outputs(self) -> Iterator[str]:
        for place, whole in enumerate(self.step.outputs):
            wide = self.wide.outputs[place] if self.wide else None
            scale = _largest(whole)
            for rank, seen in enumerate(self.found):
                span = Shard(0, seen.rows).span(rank)
                mine = whole.narrow(0, *span)
                yield from self._off(
                    "output", str(place), rank, seen.outputs[place], mine, scale, [(whole, wide)]
                )

    def _loss(self) -> Iterator[str]:
        tolerance = max(LEAST[self.experiment.precision], 1e-9) * max(abs(self.step.loss), 1.0)
        if self.wide:
            tolerance = max(tolerance, MARGIN * abs(self.wide.loss - self.step.loss))
        for rank, seen in enumerate(self.found):
            if not abs(seen.loss - self.step.loss) <= tolerance:
                yield f"step {self.index}: loss on rank {rank} is {seen.loss}, not {self.step.loss}"
                return

    def _gradients(self) -> Iterator[str]:
        wide = self.wide.gradients if self.wide else None
        known = {n: g for n, g in self.step.gradients.items() if g is not None}
        for rank, seen in enumerate(self.found):
            missing = [
                name
                for name, gradient in seen.gradients.items()
                if gradient is None
                and self.step.gradients[self._listed(name)] is not None
                and self._piece(name, rank).piece_numel(rank)
            ]
            extra = [
                name
                for name, gradient in seen.gradients.items()
                if gradient is not None and self.step.gradients[self._listed(name)] is None
            ]
            if missing:
                yield f"step {self.index}: no gradient of {missing} on rank {rank}"
            if extra:
                yield f"step {self.index}: a gradient of {extra} on rank {rank}, torch has none"
        pieces = [
            {n: g for n, g in seen.gradients.items() if g is not None and self._listed(n) in known}
            for seen in self.found
        ]
        yield from self._pieces("gradient", pieces, known, wide)

    def _values(
        self, what: str, whole: dict[str, Tensor], wide: Mapping[str, Tensor] | None
    ) -> Iterator[str]:
        if what == "buffer" and not self.alike:
            return  # each rank has its own, until somebody asks
        pieces = []
        for seen in self.found:
            names = {n for n in seen.pieces if self.expected.names.get(n) in whole}
            pieces.append({name: seen.pieces[name] for name in names})
        there = {self.expected.names[name] for some in pieces for name in some}
        if lost := sorted(set(whole) - there):
            yield f"step {self.index}: no {what} {lost}"
        yield from self._pieces(what, pieces, whole, wide)

    def _state(self) -> Iterator[str]:
        whole, wide = {}, {}
        for name, states in self.step.state.items():
            for state, tensor in states.items():
                whole[f"{state}/{name}"] = tensor
                if self.wide:
                    wide[f"{state}/{name}"] = self.wide.state[name][state]
        pieces = []
        for seen in self.found:
            mine = {}
            for entry, tensor in seen.state.items():
                _, state, name = entry.split("/", 2)
                if tensor.numel() == 0 or not self._piece(name, 0).trainable:
                    continue
                key = f"{state}/{self.expected.names[name]}"
                if key in whole:
                    mine[f"{state}/{name}"] = tensor
                elif tensor.any():
                    yield f"step {self.index}: state {key}, torch has none"
            pieces.append(mine)
        there = {f"{k.split('/', 1)[0]}/{self.expected.names[k.split('/', 1)[1]]}"
                 for some in pieces for k in some}  # fmt: skip
        if lost := sorted(key for key in set(whole) - there if whole[key].numel()):
            yield f"step {self.index}: no state {lost}"
        for state in sorted({key.split("/", 1)[0] for key in whole}):
            those = {k: v for k, v in whole.items() if k.startswith(f"{state}/")}
            mine = [{k: v for k, v in some.items() if k.startswith(f"{state}/")} for some in pieces]
            yield from self._pieces("state", mine, those, wide or None)

    def _evaluation(self) -> Iterator[str]:
        loss, accuracy = self.step.evaluation
        tolerance = LEAST[self.experiment.precision] * max(abs(loss), 1.0)
        if self.wide:
            tolerance = max(tolerance, MARGIN * abs(self.wide.evaluation[0] - loss))
        for rank, seen in enumerate(self.found):
            if seen.evaluation is None:
                continue
            if not abs(seen.evaluation["loss"] - loss) <= tolerance:
                given = seen.evaluation["loss"]
                yield f"step {self.index}: evaluated loss on rank {rank} is {given}, not {loss}"
            elif self.wide is None and not math.isclose(seen.evaluation["accuracy"], accuracy):
                given = seen.evaluation["accuracy"]
                yield f"step {self.index}: accuracy on rank {rank} is {given}, not {accuracy}"

    def _pieces(
        self,
        what: str,
        pieces: list[dict[str, Tensor]],
        whole: Mapping[str, Tensor],
        wide: Mapping[str, Tensor | None] | None,
    ) -> Iterator[str]:
        """Every rank's pieces against their places in whole tensors."""
        floor = 1.0 if self.experiment.precision == "bf16" else FLOOR[what]
        least = floor * max(map(_largest, whole.values()), default=0.0)
        pairs = [(tensor, (wide or {}).get(name)) for name, tensor in whole.items()]
        for rank, mine in enumerate(pieces):
            for key, piece in mine.items():
                prefix, name = key.rsplit("/", 1) if "/" in key else ("", key)
                listed = f"{prefix}/{self.expected.names[name]}" if prefix else (
                    self.expected.names[name]
                )  # fmt: skip
                tensor = whole[listed]
                scale = max(least, _largest(tensor))
                place = _cut(tensor, self._piece(name, rank), rank)
                yield from self._off(what, key, rank, piece, place, scale, pairs)

    def _listed(self, name: str) -> str:
        """The name under which torch lists what the library calls so."""
        return self.expected.names[name]

    def _piece(self, name: str, rank: int) -> WeightPlacement:
        return self.plan.flow.weights[name]

    def _off(
        self,
        what: str,
        name: str,
        rank: int,
        found: Tensor,
        expected: Tensor,
        scale: float,
        rounding: list[tuple[Tensor, Tensor | None]],
    ) -> Iterator[str]:
        where = f"step {self.index}: {what} {name} on rank {rank}"
        if found.shape != expected.shape:
            yield f"{where} is {tuple(found.shape)}, not {tuple(expected.shape)}"
            return
        if found.numel() == 0:
            return
        apart = (found.double() - expected.double()).abs()
        off = torch.where(found == expected, 0.0, apart).max().item()  # infinities are alike
        precision = self.experiment.precision
        tolerance = LEAST[precision]
        if self.wide is not None:
            moved = max((_largest(a.double() - b.double()) for a, b in rounding if b is not None),
                        default=0.0)  # fmt: skip
            tolerance = max(tolerance, min(MARGIN * moved / (scale or 1.0), MOST[precision]))
        if not off <= tolerance * scale and off != 0.0:
            yield f"{where} is off by {off / (scale or 1.0):.1e}"


def _cut(tensor: Tensor, placed: WeightPlacement, rank: int) -> Tensor:
    """A rank's part of a whole tensor; a number of updates is nobody's part."""
    cut = placed.placement
    if tensor.ndim == 0 or not isinstance(cut, Shard):
        return tensor
    spans = cut.spans(rank % placed.group_size)
    return torch.cat([tensor.narrow(cut.dim, *span) for span in spans], cut.dim)


def _largest(tensor: Tensor) -> float:
    return tensor.abs().max().item() if tensor.numel() else 0.0


def _taken_home(case: Case, plan: Plan, last: list[Seen], checkpoint: Path) -> Iterator[str]:
    """`run.state_dict()` in the user's own module: to the bit what the ranks held at the end."""
    module = case.net.build().double()
    values = state_dict(checkpoint, plan.graph)
    try:
        module.load_state_dict(values)
    except RuntimeError as error:
        yield f"run.state_dict() does not load: {' '.join(str(error).split())}"
        return
    for rank, seen in enumerate(last):
        for name, piece in seen.pieces.items():
            if name not in values:
                continue  # a buffer that is not saved
            if not torch.equal(piece, _cut(values[name], plan.flow.weights[name], rank)):
                yield f"run.state_dict() has other bits in {name} than rank {rank}"
                return
