"""What one process computes: the original module, whole, to hold a split one against.

Only two things are not torch's own. What is drawn at random depends on the places of its elements,
since no two random streams can be compared. And where batch norm is local, its rows are normalized
in the same parts as the plan's ranks do: written without what ranks use, it knows every part, and
keeps the running statistics that one process would, which no part has.

The weights that both start from have nothing alike, so that a comparison can see every mistake.
Biases start at zero, norms at one, and some models' last layers at zero: then a bias that is added
twice, a norm cut in the wrong place or a gradient that never arrives would change nothing.
"""

import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import deepcopy
from functools import partial
from itertools import cycle, pairwise, repeat
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._pytree import tree_map

from workbench.layers.local.context import BatchContext
from workbench.layers.local.draws import PlacedDraws
from workbench.layers.local.loss import PLAIN, kept_labels, torch_options
from workbench.model.build import build_fake
from workbench.model.record.draws import drawing
from workbench.model.record.inputs import called_whole
from workbench.model.weights.files import write_tensors
from workbench.model.weights.slices import WeightsFile
from workbench.plan.experiment.experiment import CrossEntropy, Experiment, Loss, TorchData
from workbench.plan.experiment.sync import Strategy
from workbench.plan.graph.graph import Graph, Layer
from workbench.plan.placement.placement import apportion
from workbench.plan.plans.plan import Plan
from workbench.program.rows import micro_batches
from workbench.train.data.datasets import open_for, order_seed
from workbench.train.data.feed import epoch_of, listed, rows_of_step
from workbench.train.optimizer.state import (
    EMA,
    build_optimizer,
    build_scheduler,
    entry,
    grouped,
    held_or_first,
)
from workbench.train.run.scoring import NO_STEP, own_score
from workbench.train.step.loss import AUXILIARY_WEIGHT

_NARROW = (torch.float32, torch.bfloat16, torch.float16)


class NarrowWatch(TorchFunctionMode):
    """Notes whether a model computes in fp32 by itself, where all is to be in fp64.

    Some norms of language models cast what they read to fp32, and their weights with it: then the
    gradient of such a weight depends on the order of the rows, and no split can be nearer than
    another order is.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found = False

    def __torch_function__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if not self.found:
            made = (leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor))
            self.found = any(one.dtype in _NARROW and one.requires_grad for one in made)
        return result


def part_batch_norm(model: nn.Module, plan: Plan) -> None:
    """Replaces each batch norm by one that normalizes every rank's (or group's) rows apart."""
    for layer in plan.graph.layers:
        if layer.of_batch and not layer.shared:
            group_size = plan.flow.inputs[layer.name].group_size
            norm = model.get_submodule(layer.name)
            model.set_submodule(layer.name, PartedBatchNorm(norm, plan, group_size, layer.rows))


class PartedBatchNorm(nn.Module):
    """Normalizes the rows of each group of ranks by themselves.

    With P parts of n_p of the n rows, of mean s_p and unbiased variance v_p, and momentum m

        running mean   <-  (1 - m) running mean + m sum over p of (n_p / n) s_p
        running var    <-  (1 - m) running var  + m sum over p of (n_p / n) v_p

    and a batch is one batch, however many parts it has.
    """

    def __init__(self, norm: nn.Module, plan: Plan, group_size: int, rows: int) -> None:
        super().__init__()
        self.plan, self.group_size, self.rows = plan, group_size, rows
        self.eps = cast(float, norm.eps)
        self.momentum = cast("float | None", norm.momentum)
        self.training = norm.training
        self.track_running_stats = cast(bool, norm.track_running_stats)
        for name in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked"):
            value = getattr(norm, name)
            if isinstance(value, nn.Parameter):
                self.register_parameter(name, value)
            else:
                self.register_buffer(name, value)

    def forward(self, x: Tensor) -> Tensor:
        if self.running_mean is not None and not self.training:
            return self._normalized(x, of_batch=False)
        parts = [part for part in x.split(self._sizes(x.shape[0])) if len(part)]
        if self.training and self.track_running_stats:
            self._track([part.detach() for part in parts])
        return torch.cat([self._normalized(part, of_batch=True) for part in parts])

    def _sizes(self, length: int) -> list[int]:
        ranks = self.plan.rows_of(length // self.rows)
        bounds = range(0, len(ranks) + 1, self.group_size)
        return [self.rows * sum(ranks[first:end]) for first, end in pairwise(bounds)]

    def _track(self, parts: list[Tensor]) -> None:
        if self.num_batches_tracked is None:
            return
        count = cast(Tensor, self.num_batches_tracked).add_(1)
        if self.running_mean is None:
            return
        m = 1.0 / count.item() if self.momentum is None else self.momentum
        total = sum(len(part) for part in parts)
        for running, statistic in (("running_mean", torch.mean), ("running_var", torch.var)):
            moved = cast(Tensor, getattr(self, running)).mul_(1.0 - m)
            for part in parts:
                dims = [dim for dim in range(part.ndim) if dim != 1]
                moved.add_(statistic(part, dims), alpha=m * len(part) / total)

    def _normalized(self, x: Tensor, *, of_batch: bool) -> Tensor:
        mean, var = (None, None) if of_batch else (self.running_mean, self.running_var)
        weight, bias = cast("Tensor | None", self.weight), cast("Tensor | None", self.bias)
        given = cast("Tensor | None", mean), cast("Tensor | None", var)
        return F.batch_norm(x, *given, weight, bias, of_batch, 0.0, self.eps)


# Of the noise's standard deviation to the constant, and the constant that zero counts as.
NOISE, LEAST = 0.1, 0.1


def vary(graph: Graph, weights: Path, path: Path) -> None:
    """Writes the weights again, with noise on each trainable tensor that is one constant.

    Args:
        path: the file to write.
    """
    reader = WeightsFile(weights)
    values = {}
    for weight in (weight for layer in graph.layers for weight in layer.weights):
        tensor = reader.read(weight.name)
        values[weight.name] = _varied(weight.name, tensor) if weight.trainable else tensor
    write_tensors(path, values)


def _varied(name: str, tensor: Tensor) -> Tensor:
    if tensor.numel() == 0 or not (tensor == tensor.flatten()[0]).all():
        return tensor
    level = max(float(tensor.flatten()[0].abs()), LEAST)
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return tensor + NOISE * level * torch.randn(tensor.shape, generator=generator).to(tensor.dtype)


class VerifyError(ValueError):
    """A plan that cannot be held against one process; the text says why."""


def place_draws(model: nn.Module, graph: Graph, context: BatchContext) -> None:
    """Lets the model's own operations draw what the layers of a split model draw.

    A module draws as its layers do, call by call. All else that draws are functions, whose draws
    come in the order in which they were traced.
    """
    modules = dict(model.named_modules())
    calls: dict[str, list[Layer]] = {}
    functions: list[Layer] = []
    for layer in graph.layers:
        path = layer.name.partition("@")[0]  # of a further call of the same module
        if path in modules and _calls(layer, modules[path]):
            calls.setdefault(path, []).append(layer)
        elif layer.random:
            functions.append(layer)
    for path, layers in calls.items():
        if any(layer.random for layer in layers):
            _place(modules[path], cycle([layer] for layer in layers), context)
    _place(model, repeat(functions), context, every=True)


def _calls(layer: Layer, module: nn.Module) -> bool:
    """Whether a layer calls a module, rather than a function whose node has the same name."""
    name = layer.target.rpartition(".")[2]
    return layer.kind == "attention" or name == type(module).__name__


def _place(
    module: nn.Module, turns: Iterator[list[Layer]], context: BatchContext, *, every: bool = False
) -> None:
    """Lets each forward pass draw what the layers whose turn it is draw; or `every` one of it."""
    forward = module.forward

    def placed(*args: Any, **kwargs: Any) -> Any:
        draws = PlacedDraws(next(turns), 1, context)
        with drawing(draws):
            found = forward(*args, **kwargs)
        if every and (left := draws.left()):
            raise VerifyError(
                f"{left} was traced to draw random numbers, and the model itself drew fewer: it "
                "decides otherwise than it did when it was traced"
            )
        return found

    module.forward = placed


def whole_model(graph: Graph, weights: Path, dtype: torch.dtype) -> nn.Module:
    """The module that the graph was traced from, with every tensor under all its names.

    It is in training mode, but for the parts that are in eval mode while it trains.
    """
    model = build_fake(graph.source)
    reader = WeightsFile(weights)
    for weight in (weight for layer in graph.layers for weight in layer.weights):
        tensor = reader.read(weight.name)
        tensor = tensor.to(dtype) if tensor.is_floating_point() else tensor
        is_parameter = weight.trainable or weight.frozen
        value = nn.Parameter(tensor, requires_grad=weight.trainable) if is_parameter else tensor
        for name in (weight.name, *weight.aliases):
            path, _, leaf = name.rpartition(".")
            owner = model.get_submodule(path)
            table = owner._parameters if is_parameter else owner._buffers
            table[leaf] = value  # type: ignore[assignment]
    return model


T = TypeVar("T", bound=Tensor)


def write_reference(experiment: Experiment, weights: Path, start: Path, path: Path) -> None:
    """Trains the whole model for `experiment.steps` and writes what `verify` compares.

    Entries: `output/<i>` (first step, global batch), `gradient/<name>` (first step, where there
    is one, before it is clipped), `weight/<name>`, `buffer/<name>` and
    `optimizer/<state>/<name>` after the last step, and `evaluation/<figure>` of the first test
    batch, unless the loss is cross-entropy and the prediction no row of scores; for each of them
    its largest absolute value under `scale/<entry>`; and in fp32, under `rounding/<entry>`, the
    largest absolute difference from the same in fp64. In fp64 that is 0, but where the model
    computes in fp32 by itself: there, the difference from the same, few rows at a time.

    Args:
        start: the file to write the weights to that both models start from, which `vary` makes.

    Raises:
        VerifyError: the experiment computes something else by design.
    """
    if experiment.sync.inexact:
        raise VerifyError(
            f"{experiment.sync!r} is inexact by design ({experiment.sync.inexact}): one process "
            f"cannot confirm it; verify the plan under Synchronous()"
        )
    vary(experiment.plan.graph, weights, start)
    watch = NarrowWatch()
    other: dict[str, Tensor] = {}
    if experiment.precision == "fp64":
        found = _trained(experiment, start, torch.float64, watch)
        if watch.found and not any(layer.of_batch for layer in experiment.plan.graph.layers):
            other = _trained(experiment, start, torch.float64, watch, apart=True)
    else:
        found = _trained(experiment, start, torch.float32, watch)
        other = _trained(experiment, start, torch.float64, watch)
    roundings = {
        f"rounding/{name}": _largest(tensor.double() - other[name].double())
        for name, tensor in found.items()
        if name in other
    }
    scales = {f"scale/{name}": _largest(tensor) for name, tensor in found.items()}
    save_file({name: t.contiguous() for name, t in (found | scales | roundings).items()}, path)


def _trained(
    experiment: Experiment,
    weights: Path,
    dtype: torch.dtype,
    watch: NarrowWatch,
    *,
    apart: bool = False,
) -> dict[str, Tensor]:
    """What the whole model gives in the first step, and holds after the last."""
    plan = experiment.plan
    context = BatchContext(0, (0,), seed=experiment.seed)
    model = _whole(plan, plan.graph, weights, context, dtype)
    named = _Named(plan.graph)
    parameters = named(model.named_parameters())
    values = experiment.optimizers
    trained = {name: parameters[name] for name in values}
    dims = {name: parameter.ndim for name, parameter in trained.items()}
    members = grouped(experiment.optimizer, trained, dims)
    optimizer = build_optimizer(experiment.optimizer, *members)
    scheduler = None
    if experiment.schedule is not None:
        scheduler = build_scheduler(experiment.schedule, optimizer, experiment.steps)
    decay = experiment.ema or 0.0
    averages = {name: p.detach().clone() for name, p in trained.items() if decay}
    graph = plan.graph
    seed = experiment.seed
    data = open_for(graph, experiment.data, "train", seed)
    loss = _loss_of(experiment, dtype)
    found: dict[str, Tensor] = {}
    for step in range(experiment.steps):
        order = rows_of_step(len(data), experiment.batch_size, order_seed(data, seed), step)
        inputs, targets = data.batch(order, epoch_of(len(data), experiment.batch_size, step))
        counts = [sum(rows) for rows in micro_batches(experiment, len(order))]
        counts = _few(graph, len(order)) if apart else counts
        batch = [_as(each, dtype) for each in listed(inputs)]
        with watch:
            outputs = _outputs(model, graph, batch, counts, context, step)
        outputs = tuple(_as(each, dtype) for each in outputs) if apart else outputs
        optimizer.zero_grad()
        loss(graph, outputs, _widened(targets, dtype)).backward()
        if step == 0:
            found |= {f"output/{i}": out.detach().clone() for i, out in enumerate(outputs)}
            found |= {
                f"gradient/{name}": p.grad.clone()
                for name, p in parameters.items()
                if p.grad is not None
            }
        if experiment.clip_norm is not None:
            nn.utils.clip_grad_norm_(trained.values(), experiment.clip_norm)
        if experiment.clip_value is not None:
            nn.utils.clip_grad_value_(trained.values(), experiment.clip_value)
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        for name, average in averages.items():
            average.mul_(decay).add_(trained[name].detach(), alpha=1 - decay)
    found |= {entry(EMA, name): average for name, average in averages.items()}
    found |= {f"weight/{name}": p.detach().clone() for name, p in parameters.items()}
    found |= {f"buffer/{name}": b for name, b in named(model.named_buffers()).items()}
    found |= {
        entry(kind, name): held_or_first(optimizer, values[name], p, kind)
        for name, p in trained.items()
        for kind in values[name].remembers.names
    }
    for name, average in averages.items():
        trained[name].detach().copy_(average)
    return found | _evaluated(experiment, loss, model, weights, context, dtype, apart=apart)


def _few(graph: Graph, count: int) -> list[int]:
    """So many rows, as few at a time as the model takes."""
    least = min(graph.least_batch, count)
    return [least] * (count // least - 1) + [least + count % least]


def _outputs(
    model: nn.Module,
    graph: Graph,
    inputs: Sequence[Tensor],
    counts: Sequence[int],
    context: BatchContext,
    step: int,
) -> tuple[Tensor, ...]:
    """What the model gives for a batch; it sees micro-batches of so many rows one by one."""
    found, first = [], 0
    for rows, *parts in zip(counts, *(each.split(list(counts)) for each in inputs), strict=True):
        context.set((rows,), first_row=first, step=step)
        found.append(trained_on(called_whole(model, graph.inputs, parts)))
        first += rows
    return tuple(torch.cat(each) for each in zip(*found, strict=True))


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers under all their names."""
    named = (model.named_parameters, model.named_buffers)
    return {name: t.detach() for of in named for name, t in of(remove_duplicate=False)}


def _whole(
    plan: Plan, mode: Graph, weights: Path, context: BatchContext, dtype: torch.dtype
) -> nn.Module:
    """The whole model, which draws as the layers of `mode` do: of training, or of evaluation."""
    model = whole_model(mode, weights, dtype)
    place_draws(model, mode, context)
    if plan.batch_norm == "local":
        part_batch_norm(model, plan)
    return model


class _Named:
    """Tensors by the names that the graph gives them; some have several."""

    def __init__(self, graph: Graph) -> None:
        weights = (weight for layer in graph.layers for weight in layer.weights)
        self._first = {alias: weight.name for weight in weights for alias in weight.aliases}

    def __call__(self, pairs: Iterable[tuple[str, T]]) -> dict[str, T]:
        return {self._first.get(name, name): tensor for name, tensor in pairs}


Objective = Callable[[Graph, tuple[Tensor, ...], Any], Tensor]
"""(the model in its mode, its outputs, targets) -> the loss of the batch."""


def _loss_of(experiment: Experiment, dtype: torch.dtype) -> Objective:
    """The user's own function on the whole batch, or cross-entropy."""
    value = experiment.loss
    if value is None or isinstance(value, CrossEntropy):
        return partial(_cross_entropy, value or PLAIN)
    function = value.function.loaded
    weigh = None if value.weights is None else value.weights.loaded
    if isinstance(function, nn.Module):
        function = deepcopy(function).to(dtype)

    def loss(graph: Graph, outputs: tuple[Tensor, ...], targets: Any) -> Tensor:
        found: Tensor = function(graph.arranged(outputs), targets)
        if weigh is not None:
            weights: Tensor = weigh(targets)
            return (found * weights).sum() / weights.sum()
        return found.sum() if value.reduction == "sum" else found.mean()

    return loss


def _cross_entropy(
    value: CrossEntropy, graph: Graph, outputs: tuple[Tensor, ...], labels: Tensor
) -> Tensor:
    """The mean over the batch; auxiliary heads have a part in it."""
    if graph.scores_tokens:  # [rows, tokens, classes]
        outputs, labels = tuple(x.flatten(0, 1) for x in outputs), labels.flatten()
    options = torch_options(value, outputs[0])
    loss = F.cross_entropy(outputs[0], labels, **options)
    for auxiliary in outputs[1:]:
        loss = loss + AUXILIARY_WEIGHT * F.cross_entropy(auxiliary, labels, **options)
    return loss


def _as(inputs: Tensor, dtype: torch.dtype) -> Tensor:
    return inputs.to(dtype) if inputs.is_floating_point() else inputs


def _widened(targets: Any, dtype: torch.dtype) -> Any:
    """In double precision, targets that were made in single precision, exactly."""
    if dtype != torch.float64:
        return targets
    return tree_map(lambda each: _as(each, dtype), targets)


def _evaluated(
    experiment: Experiment,
    loss: Objective,
    model: nn.Module,
    weights: Path,
    context: BatchContext,
    dtype: torch.dtype,
    *,
    apart: bool,
) -> dict[str, Tensor]:
    """The figures of the first test batch; the model is left in evaluation mode."""
    graph, value = experiment.plan.graph, experiment.data
    scores = len(graph[graph.outputs[0]].output_shape) == 1 or graph.scores_tokens
    own = experiment.loss if isinstance(experiment.loss, Loss) else None
    if (own is None and not scores) or (isinstance(value, TorchData) and value.test is None):
        return {}
    if graph.evaluation is not None:
        trained = _tensors(model)
        model = _whole(experiment.plan, graph.evaluation, weights, context, dtype)
        for name, tensor in _tensors(model).items():
            tensor.copy_(trained[name])
    data = open_for(graph, value, "test", experiment.seed)
    rows = min(len(data), experiment.batch_size)
    inputs, targets = data.batch(torch.arange(rows))
    targets = _widened(targets, dtype)
    model.eval()
    with torch.no_grad():
        batch = [_as(each, dtype) for each in listed(inputs)]
        counts = _few(graph.evaluation or graph, rows) if apart else [rows]
        outputs = _outputs(model, graph, batch, counts, context, NO_STEP)
        outputs = tuple(_as(each, dtype) for each in outputs) if apart else outputs
        if own is None:
            outputs = outputs[:1]  # auxiliary heads are for training
        there = graph.evaluation or graph
        found = {"loss": loss(there, outputs, targets).double()}
        if experiment.metrics is None and own is None:
            classes_in = -1 if graph.scores_tokens else 1
            right = (outputs[0].argmax(dim=classes_in) == targets).double()
            of_labels = experiment.loss if isinstance(experiment.loss, CrossEntropy) else PLAIN
            found["accuracy"] = right[kept_labels(targets, of_labels)].mean()
            if "perplexity" in experiment.figures:
                found["perplexity"] = found["loss"].exp()
        for name, metric in (experiment.metrics or {}).items():
            score = own_score(name, metric, there)
            figure = score.figure(score.sums(outputs, targets, rows).double(), rows)
            found[name] = torch.tensor(figure, dtype=torch.float64)
    return {f"evaluation/{name}": figure for name, figure in found.items()}


def _largest(tensor: Tensor) -> Tensor:
    if not tensor.numel():
        return torch.zeros((), dtype=torch.float64)
    return (tensor.int() if tensor.dtype == torch.bool else tensor).abs().max().double()


def trained_on(outputs: object) -> tuple[Tensor, ...]:
    """The prediction and then the auxiliary heads.

    A traced module returns nothing else, and in this order; torchvision's in the same, with None
    for heads that it was built without.
    """
    given = (
        (outputs,) if isinstance(outputs, Tensor) else cast("tuple[Tensor | None, ...]", outputs)
    )
    return tuple(output for output in given if output is not None)


Weights = dict[str, Tensor]


def in_one_process(experiment: Experiment, module: nn.Module) -> Weights:
    """The weights in the end, by a strategy's methods and plain torch alone; SGD, fp64.

    The loop knows nothing of programs, buckets or groups: it has a copy of the model for each
    replica, and calls the strategy's own methods where `Strategy` says that they are called.
    """
    return _Replicas(experiment, module).trained()


class _Replicas:
    def __init__(self, experiment: Experiment, module: nn.Module) -> None:
        self.experiment, self.timing = experiment, experiment.sync.timing
        self.strategy: Strategy = experiment.sync.strategy
        world = experiment.plan.world_size if self.timing.of_weights else 1
        self.copies = [deepcopy(module).double() for _ in range(world)]
        options = experiment.optimizer.options
        self.optimizers = [torch.optim.SGD(m.parameters(), **options) for m in self.copies]
        self.states = self._begun()
        self.flying: deque[tuple[list[Tensor], list[Tensor]]] = deque()
        self.added: list[Tensor] = []
        self.since = [0] * world
        self.data = open_for(experiment.plan.graph, experiment.data, "train")

    def trained(self) -> Weights:
        """All steps, and the averaging that a run ends with."""
        for step in range(self.experiment.steps):
            if step == self.timing.warmup:
                self.states = self._begun()
            if self.timing.of_weights:
                self._on_weights(step)
            else:
                self._on_gradients(step)
        if any(self.since):
            self._average(keeps_state=True)
        return {name: p.detach() for name, p in self.copies[0].named_parameters()}

    def _begun(self) -> list[dict[str, Tensor]]:
        return [
            {
                kind: p.clone() if first == "weight" else torch.full_like(p, first)
                for kind, first in self.timing.remembers.items()
            }
            for p in (each.detach() for each in self.copies[0].parameters())
        ]

    def _gradients(self, model: nn.Module, order: Tensor) -> list[Tensor]:
        """Those of a sum over rows."""
        inputs, targets = self.data.batch(order)
        batch = [x.double() if x.is_floating_point() else x for x in listed(inputs)]
        scores = called_whole(model, self.experiment.plan.graph.inputs, batch)
        loss = F.cross_entropy(scores, targets, reduction="sum")
        return list(torch.autograd.grad(loss, list(model.parameters())))

    def _order(self, step: int) -> Tensor:
        samples, size = len(self.data), self.experiment.batch_size
        return rows_of_step(samples, size, self.experiment.seed, step)

    @torch.no_grad()
    def _ruled(self, step: int, index: int, grads: list[Tensor], then: list[Tensor]) -> None:
        """Moves the weights of one copy."""
        parameters = list(self.copies[index].parameters())
        warm = step < self.timing.warmup
        for p, grad, at, state in zip(parameters, grads, then, self.states, strict=True):
            given = grad.clone()
            if self.timing.adjusts and not warm:
                given = self.strategy.gradient(step, given, p.detach(), at, state)
            p.grad = given.clone()
        self.optimizers[index].step()

    def _on_gradients(self, step: int) -> None:
        (model,), timing, order = self.copies, self.timing, self._order(step)
        grads = [g / len(order) for g in self._gradients(model, order)]
        now = [p.detach() for p in model.parameters()]
        then = [p.clone() for p in now]
        if step < timing.warmup:
            self._ruled(step, 0, grads, now)
            return
        if timing.late:
            self.flying.append((grads, then))
            if len(self.flying) <= timing.late:
                return
            grads, then = self.flying.popleft()
        if timing.adds_up:
            added = self.added or [torch.zeros_like(g) for g in grads]
            self.added = [a + g for a, g in zip(added, grads, strict=True)]
            if (step + 1) % timing.every:
                return
            grads, self.added = self.added, []
        self._ruled(step, 0, grads, then if timing.keeps_weights else now)

    def _on_weights(self, step: int) -> None:
        order, world = self._order(step), len(self.copies)
        rows = apportion(len(order), (1,) * world)
        every = [
            self._gradients(model, own)
            for model, own in zip(self.copies, order.split(list(rows)), strict=True)
        ]
        warm = step < self.timing.warmup
        sums = [sum(of) / len(order) for of in zip(*every, strict=True)]
        for index, (own, count) in enumerate(zip(every, rows, strict=True)):
            grads = sums if warm else [g / max(1, count) for g in own]
            self._ruled(step, index, grads, [p.detach() for p in self.copies[index].parameters()])
        if warm:
            return
        self.since = [a + b for a, b in zip(self.since, rows, strict=True)]
        if (step + 1) % self.timing.every == 0:
            self._average(keeps_state=False)
            self._correct(step)

    @torch.no_grad()
    def _average(self, *, keeps_state: bool) -> None:
        for several in zip(*(model.parameters() for model in self.copies), strict=True):
            self._mean([p.detach() for p in several])
            states = [o.state[p] for o, p in zip(self.optimizers, several, strict=True)]
            buffers = [s["momentum_buffer"] for s in states if s.get("momentum_buffer") is not None]
            if self.timing.momentum == "average" and buffers:
                self._mean(buffers)
            elif self.timing.momentum == "reset" and not keeps_state:
                for state in states:
                    state.clear()
        self.since = [0] * len(self.since)

    def _mean(self, tensors: Sequence[Tensor]) -> None:
        total = sum(self.since)
        mean = torch.stack([t * (n / total) for t, n in zip(tensors, self.since, strict=True)])
        for tensor in tensors:
            tensor.copy_(mean.sum(0))

    @torch.no_grad()
    def _correct(self, step: int) -> None:
        if not self.timing.corrects:
            return
        for index, several in enumerate(zip(*(m.parameters() for m in self.copies), strict=True)):
            mean = several[0].detach().clone()
            found = self.strategy.averaged(step, mean, self.states[index]).clone()
            for p in several:
                p.copy_(found)
