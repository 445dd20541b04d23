"""What one process computes of a case, in plain torch."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import islice
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.oracle import oracle
from tests.oracle.cases import Case, optimizer_of, scheduler_of
from tests.oracle.losses import Given
from tests.oracle.opaque import DATA, WRONG_DATA, Data, seed_all
from tests.oracle.oracle import Batch, Loss, Step, Task, of_labels
from workbench.plan.experiment.experiment import (
    Experiment,
    Pipelined,
)
from workbench.plan.graph.graph import Input
from workbench.plan.placement.placement import apportion
from workbench.plan.plans.plan import Plan
from workbench.train.data.datasets import open_data
from workbench.train.data.feed import rows_of_step

EXACT, MARGIN = 1e-9, 10.0
SHAKEN = {"fp64": 1e-14, "fp32": 1e-6, "bf16": 4e-3, "fp16": 5e-4}
# No wrong factor is as small, whatever the rounding: of fp32, of bf16, and of fp16.
# Adam's first steps are the gradient's sign: in bf16, rounding may turn it, by twice lr = 0.01.
LEAST = {"fp64": EXACT, "fp32": 1e-4, "bf16": 3e-2, "fp16": 4e-3}
MOST = {"fp64": 1e-3, "fp32": 0.24, "bf16": 0.5, "fp16": 0.5}
# A tensor counts as no smaller than this part of the largest of its kind.
FLOOR = {"output": 1.0, "gradient": 1e-3, "weight": 1.0, "buffer": 1e-3, "state": 1e-3}
AUXILIARY = 0.3


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
            self.rounded = self._trained(case.net.build(), self._wide())

    def _wide(self) -> Task:
        """The same in fp64, where no scale is too large: it skips what was skipped."""
        skipped = frozenset(index for index, step in enumerate(self.steps) if step.skipped)
        return replace(self.task, precision="fp64", scaler=None, skipped=skipped)

    def shaken(self, seed: int) -> None:
        """Finds out what rounding does to this case: what it starts from moves by as much.

        A gradient that is zero but for rounding is divided by itself in Adam, so gradients move,
        too; what is beside a kink falls to the other side.
        """
        self.rounded = self._moved(self.experiment.precision, seed)

    def is_decided_by_rounding(self) -> bool:
        """Whether inputs that move by rounding move the gradients by what a wrong one would.

        Batch norm over two samples that are nearly equal divides their difference by itself. In
        fp16, a sum over all rows may overflow where those over some rows do not.
        """
        if self._overflows_by_rows():
            return True
        precision = self.experiment.precision
        for step, *others in zip(self.steps, self.rounded, self._moved(precision), strict=True):
            known = {name: g for name, g in step.gradients.items() if g is not None}
            scale = max(map(largest, known.values()), default=0.0)
            for other in others:
                pairs = ((g.double(), other.gradients[name]) for name, g in known.items())
                apart = max((largest(a - b.double()) for a, b in pairs if b is not None),
                            default=0.0)  # fmt: skip
                if apart > MOST[precision] * scale:
                    return True
        return False

    def _overflows_by_rows(self) -> bool:
        """Whether torch itself skips other steps if it sees fewer rows at a time, as ranks do.

        Equal micro-batches stand for the ranks' rows, which may be others, and a smaller scale
        does, also where a batch norm needs all rows at once.
        """
        plan = self.experiment.plan
        if self.task.scaler is None:
            return False
        scale = self.task.scaler.get("init_scale", 2.0**16) / plan.world_size
        fewer = [replace(self.task, scaler={**self.task.scaler, "init_scale": scale})]
        if all(one.kind != "batch_norm" for one in plan.graph.layers):
            batches = [replace(batch, ranks=()) for batch in self.task.batches]
            accumulate = self.task.accumulate * plan.world_size
            fewer.append(replace(self.task, accumulate=accumulate, batches=batches))
        skipped = [step.skipped for step in self.steps]
        return any(
            [step.skipped for step in self._trained(self.case.net.build(), task)] != skipped
            for task in fewer
        )

    def _moved(self, precision: str, seed: int = 0) -> list[Step]:
        """The steps of inputs, and of weights that are not in fp64, that are other by rounding."""
        generator = torch.Generator().manual_seed(seed)

        def moved(x: Tensor) -> Tensor:
            noise = torch.randn(x.shape, generator=generator, dtype=torch.float64)
            wide = x.double() * (1.0 + SHAKEN[precision] * noise)
            return wide if precision == "fp64" else wide.to(x.dtype)

        def build(parameters: dict[str, nn.Parameter]) -> torch.optim.Optimizer:
            optimizer = self.task.optimizer(parameters)
            optimizer.register_step_pre_hook(lambda *_: shake(parameters.values()))
            return optimizer

        def shake(parameters: Iterable[nn.Parameter]) -> None:
            """What is zero in one order of summands is not in another."""
            gradients = [p.grad for p in parameters if p.grad is not None]
            scale = SHAKEN[precision] * max(map(largest, gradients), default=0.0)
            for one in gradients:
                one.add_(scale * torch.randn(one.shape, generator=generator, dtype=torch.float64))

        batches = [replace(batch, inputs=moved(batch.inputs)) for batch in self.task.batches]
        module = self.case.net.build()
        if precision == "fp64":
            return self._trained(module, replace(self._wide(), batches=batches, optimizer=build))
        for parameter in module.parameters():
            parameter.data = moved(parameter.data)
        return self._trained(module, replace(self.task, batches=batches))

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
        own = case.run.own
        return Task(
            optimizer=optimizer_of(experiment),
            outputs=case.net.outputs,
            loss=mean_loss if own is None else own_loss(own.for_one_process(self.module)),
            share=None if own is None else own.share,
            ignored=None if own is None else own.ignored,
            batches=batches,
            test=test,
            precision=experiment.precision,
            scaler=_scaler_of(experiment),
            accumulate=experiment.accumulate,
            seed=experiment.seed,
            draws={layer.name: len(layer.draws) for layer in graph.layers if layer.draws},
            local=local if plan.batch_norm == "local" else {},
            late=sync.width - 1 if late else 0,
            warmup=sync.warmup if late else 0,
            scheduler=scheduler_of(experiment),
            ema=experiment.ema,
            clip_norm=experiment.clip_norm,
            clip_value=experiment.clip_value,
        )


def _scaler_of(experiment: Experiment) -> dict[str, float] | None:
    """The arguments of torch's own GradScaler."""
    if experiment.precision != "fp16":
        return None
    return {} if experiment.loss_scale is None else experiment.loss_scale.model_dump()


def mean_loss(outputs: tuple[Tensor, ...], labels: Tensor) -> Tensor:
    """Cross-entropy of the first output, and of the others as auxiliary heads."""
    wide = widened(outputs)
    loss = F.cross_entropy(*of_labels(wide[0], labels))
    for auxiliary in wide[1:]:
        loss = loss + AUXILIARY * F.cross_entropy(*of_labels(auxiliary, labels))
    return loss


def own_loss(of_rows: Callable[[Given, Tensor], Tensor]) -> Loss:
    """A loss of tests/oracle/losses.py, which gets the one output alone where it is one."""

    def mean(outputs: tuple[Tensor, ...], labels: Tensor) -> Tensor:
        wide = widened(outputs)
        return of_rows(wide[0] if len(wide) == 1 else wide, labels)

    return mean


def widened(outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(o.float() if o.dtype in (torch.bfloat16, torch.float16) else o for o in outputs)


def _batches(
    case: Case, experiment: Experiment, after: Experiment
) -> tuple[list[Batch], tuple[Tensor, Tensor]]:
    """The rows of every step and of the evaluation."""
    if case.run.data is not None:
        return _own_batches(case, experiment, after, (DATA | WRONG_DATA)[case.run.data])
    shape, classes = case.net.shape, experiment.plan.graph.num_classes
    data, test = (
        open_data(
            experiment.data,
            (Input(shape, vocabulary=case.net.vocabulary),),
            classes,
            split,
            per_token=classes == case.net.vocabulary,  # the next token is predicted
        )
        for split in ("train", "test")
    )
    found = []
    for step in range(experiment.steps):
        order = rows_of_step(len(data), experiment.batch_size, experiment.seed, step)
        plan = (experiment if step == 0 or case.way in ("straight", "again") else after).plan
        counts = filter(None, apportion(len(order), (1,) * experiment.accumulate))
        ranks = tuple(map(plan.rows_of, counts))
        found.append(Batch(*data.batch(order), ranks, _rows_evaluated(plan, experiment, len(test))))
    return found, test.batch(torch.arange(len(test)))


def _own_batches(
    case: Case, experiment: Experiment, after: Experiment, own: Data
) -> tuple[list[Batch], tuple[Tensor, Tensor]]:
    """As a plain loop reads a data set of one's own, and collates what it has read."""
    run, graph = case.run, experiment.plan.graph
    rows, test = (run.rows(graph, split) for split in ("train", "test"))
    data, collate = own.made(rows)
    length, found, coming = len(rows) - own.short, [], iter(())
    steps = -(-length // run.batch_size)

    def batch(samples: list[Any]) -> tuple[Tensor, Tensor]:
        made = collate(samples)
        return (made["x"], made["y"]) if own.keyed else made

    for step in range(run.steps):
        epoch, first = divmod(step, steps)
        if first == 0 and hasattr(data, "set_epoch"):
            data.set_epoch(epoch)
        seed = None if own.is_stream else run.seed
        order = rows_of_step(length, run.batch_size, seed, step).tolist()
        with torch.random.fork_rng(devices=()):
            if own.is_stream:
                coming = iter(data) if first == 0 else coming
                samples = list(islice(coming, len(order)))
            else:
                samples = [read(data, run.seed, epoch, index) for index in order]
            made = batch(samples)
        plan = (experiment if step == 0 or case.way in ("straight", "again") else after).plan
        counts = filter(None, apportion(len(order), (1,) * run.accumulate))
        evaluated = _rows_evaluated(plan, experiment, len(test))
        found.append(Batch(*made, tuple(map(plan.rows_of, counts)), evaluated))
    return found, own.made(test)[1]([*test])


def read(data: Any, seed: int, epoch: int, index: int) -> Any:
    """One sample, while whose reading random numbers follow from its place."""
    seed_all(seed, epoch, index)
    return data[index]


def _rows_evaluated(plan: Plan, experiment: Experiment, count: int) -> tuple[tuple[int, ...], ...]:
    """Rows of each rank, for each batch of an evaluation of `count` rows."""
    firsts = range(0, count, experiment.batch_size)
    return tuple(plan.rows_of(min(experiment.batch_size, count - first)) for first in firsts)


def _names(module: nn.Module) -> dict[str, str]:
    """For every name of a parameter or buffer, the one under which torch lists it."""
    found: dict[str, str] = {}
    for listed in (nn.Module.named_parameters, nn.Module.named_buffers):
        first = {id(tensor): name for name, tensor in listed(module)}
        found |= {n: first[id(t)] for n, t in listed(module, remove_duplicate=False)}
    return found


def largest(tensor: Tensor) -> float:
    return tensor.abs().max().item() if tensor.numel() else 0.0
