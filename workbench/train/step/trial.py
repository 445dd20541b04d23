"""What is tried before the first step: a user's own loss and metrics, and fp16.

Each rank computes the loss of its own rows, by a copy of the user's function. So the function must
treat each row by itself, remember nothing, draw nothing at random, and read no weight of the model,
whose copy on a rank would never move. One batch says little of that: a loss may mix rows in a part
of its range only, as a mean over the rows whose loss is above a threshold does. So it is tried at
several places: at scores and probabilities, at large outputs, at outputs that descend to what the
loss wants and ascend from it, and with rows of both kinds in one batch. While a run trains, it is
tried again on what the model really returns, and where targets have values that were not tried.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from workbench.layers.local.loss import PLAIN
from workbench.model.record.python_state import Walk, moved
from workbench.plan.experiment.task import CrossEntropy
from workbench.plan.extension.user_object import OwnObjectError, is_looked_at
from workbench.plan.graph.graph import Graph
from workbench.plan.io.errors import ExperimentError
from workbench.train.data.copied import Reads
from workbench.train.data.datasets import Dataset, order_seed
from workbench.train.data.feed import as_wide
from workbench.train.data.reading import DataError, Generators
from workbench.train.data.samples import OwnSamples
from workbench.train.step.loss import OwnLoss, Seen, check_labels, widened

ROWS = 64
ELEMENTS = 2**22
"""Of outputs that are drawn at most, unless two rows have more: tokens' scores have many."""


@dataclass(frozen=True)
class Trial:
    """Targets from all over a data set, and outputs such as the model gives.

    Attributes:
        outputs: numbers between 0 and 1, which are valid as scores and as probabilities.
        collated: the targets from one sample to before another, by the user's own collate function,
            which may pad them to the longest; None: they are rows of the targets.
    """

    graph: Graph
    rows: int
    outputs: tuple[Tensor, ...]
    targets: Any
    collated: Callable[[int, int], Any] | None = None

    @classmethod
    def of(
        cls,
        graph: Graph,
        data: Dataset,
        device: torch.device,
        dtype: torch.dtype,
        batch_size: int = ROWS,
    ) -> "Trial":
        """Reads some samples; fewer of a model whose outputs are large, but two if it can.

        Their targets come again where a batch has more.
        """
        shapes = [(graph[name].rows, *graph[name].output_shape) for name in graph.outputs]
        most = ELEMENTS // max(1, sum(map(math.prod, shapes)))
        own = data if isinstance(data, OwnSamples) and data.collates else None
        rows = min(len(data), max(2, min(ROWS if own else max(ROWS, batch_size), most)))
        generator = torch.Generator().manual_seed(0)
        drawn = [
            torch.rand((each * rows, *shape), generator=generator, dtype=dtype)
            for each, *shape in shapes
        ]
        outputs = tuple(output.mul_(0.9).add_(0.05).to(device) for output in drawn)

        def moved(targets: Any) -> Any:
            return tree_map(lambda each: as_wide(each, dtype).to(device), targets)

        indices = _spread(data, min(rows, ROWS))
        if own is None:
            again = torch.arange(rows) % len(indices)
            targets = tree_map(lambda each: each[again], data.batch(indices)[1])
            return cls(graph, rows, outputs, moved(targets))
        samples, batch_of = own.read(indices), own.fitting

        def collated(begin: int, end: int) -> Any:
            return moved(batch_of(samples[begin:end])[1])

        return cls(graph, rows, outputs, collated(0, rows), collated)

    def cut(self, at: int) -> Iterator["Trial"]:
        """The rows up to this one, and the others; parts without rows are left out."""
        for begin, end in ((0, at), (at, self.rows)):
            if begin < end:
                yield self._part(begin, end)

    def _part(self, begin: int, end: int) -> "Trial":
        outputs = tuple(self._span(output, begin, end) for output in self.outputs)
        if self.collated is None:
            targets = tree_map(lambda each: each[begin:end], self.targets)
            return Trial(self.graph, end - begin, outputs, targets)
        collated = self.collated

        def later(first: int, last: int) -> Any:
            return collated(begin + first, begin + last)

        return Trial(self.graph, end - begin, outputs, collated(begin, end), later)

    def pairs(self, most: int) -> Iterator["Trial"]:
        """Two rows each, of so many pairs at most; of two rows, none."""
        for begin in range(0, min(self.rows, 2 * most) - 1 if self.rows > 2 else 0, 2):
            yield self._part(begin, begin + 2)

    @property
    def elements(self) -> int:
        return sum(output.numel() for output in self.outputs)

    def drawn(self, generator: torch.Generator) -> "Trial":
        outputs = (
            torch.randn(one.shape, generator=generator, dtype=one.dtype).to(one)
            for one in self.outputs
        )
        return replace(self, outputs=tuple(outputs))

    def scaled(self, factor: float) -> "Trial":
        return replace(self, outputs=tuple(factor * output for output in self.outputs))

    def beside(self, other: "Trial", at: int) -> "Trial":
        """The outputs of the rows up to this one, and another trial's of those after it."""
        pairs = zip(self.outputs, other.outputs, strict=True)
        outputs = (
            torch.cat([self._span(one, 0, at), self._span(two, at, self.rows)])
            for one, two in pairs
        )
        return replace(self, outputs=tuple(outputs))

    def towards(self, other: "Trial") -> "Trial":
        """From row to row, outputs that lead from these to another trial's."""

        def between(one: Tensor, two: Tensor) -> Tensor:
            ramp = torch.linspace(0, 1, len(one), dtype=one.dtype, device=one.device)
            return one + ramp.view(-1, *[1] * (one.ndim - 1)) * (two - one)

        return replace(self, outputs=tuple(map(between, self.outputs, other.outputs)))

    def _span(self, output: Tensor, begin: int, end: int) -> Tensor:
        each = len(output) // self.rows
        return output[begin * each : end * each]

    def __str__(self) -> str:
        shapes = " and ".join(str(tuple(output.shape)) for output in self.outputs)
        return f"outputs of shape {shapes} and the targets of {self.rows} samples"


def check_classes(graph: Graph, data: Dataset, options: CrossEntropy = PLAIN) -> None:
    """Reads some samples, on the CPU: on a GPU a class that is not there ends the process.

    Raises:
        DataError: the inputs are none that the model reads, or the targets none of cross-entropy's.
    """
    rows = min(ROWS, len(data))
    targets = data.batch(_spread(data, rows))[1]
    for name in graph.outputs:
        try:
            check_labels(graph, name, targets, options)
        except DataError as error:
            raise DataError(f"of {rows} samples that were tried: {error}") from None


def _spread(data: Dataset, rows: int) -> Tensor:
    """The indices of so many samples from all over a data set; of a stream, of the first."""
    # Data sets are often sorted by class; but what is only iterated shall not be read whole.
    spread = 1 if order_seed(data, 0) is None else len(data) / rows
    return (torch.arange(rows) * spread).long()


def try_fp16(module: nn.Module, device: torch.device) -> None:
    """Tries layers that not every processor computes in fp16: of oneDNN, those are LSTMs.

    Raises:
        ExperimentError: the device does not compute one; the text names the layer.
    """
    for name, layer in module.named_modules():
        if not isinstance(layer, nn.LSTM):
            continue
        small = nn.LSTM(2, 2, proj_size=min(layer.proj_size, 1), device=device)
        try:
            with torch.autocast(device.type, torch.float16):
                small(torch.zeros(1, 1, 2, device=device))
        except RuntimeError as error:
            raise ExperimentError(
                f"precision: layer {name!r} is an LSTM, which this {device.type} does not compute "
                f"in fp16 ({error}); set precision='bf16' or 'fp32'"
            ) from error


# The relative difference that tells rounding from rows that are mixed; at places that a loss was
# not made for, numbers may cancel.
CLOSE = {torch.float64: 1e-9, torch.float32: 1e-4}
ELSEWHERE = 1e-3
STEPS = (8.0, 4.0, 2.0, 1.0, 0.5, 0.25)
"""How far outputs descend, step by step: in all, as far as scores of a confident model."""
KINKS = 100
"""How much more gradients may differ than values: a ReLU's, at 0, by rounding."""
MOST_ROWS, MOST_ELEMENTS = 16, 2**18
"""Rows that are looked at while it trains; elements of outputs, which have few places beyond."""
MOST_NEW = 64
"""Calls that are looked at since their targets have new values: of many classes, each is one."""
SCALES = (1.0, 4.0)
"""What a model's own outputs are multiplied by when the loss is tried on them."""

_RECIPE = (
    "let forward return what the loss needs, as an auxiliary output: "
    "return scores, self.fc.weight.abs().sum() * scores.new_ones(len(scores), 1), with "
    "wb.trace(..., outputs=('prediction', 'auxiliary'))"
)


class LossTrial:
    """Tries one loss, by copies of the user's function.

    Args:
        held: the names of the model's own tensors, by their memory, in the process that has the
            model.
    """

    def __init__(self, loss: OwnLoss, held: Mapping[int, str] = MappingProxyType({})) -> None:
        self._given, self._loss, self._held, self._calls = loss, loss.fresh(held), held, 0
        self._batch_size = 0
        self._known, self._news = set[tuple[int, float]](), 0

    def check(self, tried: Trial, batch_size: int = 1) -> None:
        """Tries the loss at several places.

        Args:
            tried: targets, and outputs between 0 and 1, which are valid as scores and as
                probabilities.

        Raises:
            OwnObjectError: the loss of a row, or its gradient, depends on other rows, on earlier
                calls, on random numbers or on weights; or it has no gradient, or the function
                raised.
        """
        with torch.enable_grad():
            try:
                self._check_calls(tried)
                self._known = {value for value, _ in _values(tried.targets)}
                self._batch_size = batch_size
                # Among many rows, weights of their own are hardly told from equal ones.
                every = self._cuts(tried, pairs=8)
            except OwnObjectError:
                raise
            except Exception as error:  # whatever its own code raises
                raise OwnObjectError(self._failed(tried, error)) from error
            self._refuse_mixed(every, tried)
            for place in self._places(tried) if tried.rows > 1 else ():
                cuts = self._tried_at(place)
                self._refuse_mixed([one for one in cuts if one.shows], place)
            *_, behind = tried.cut(tried.rows // 2)
            fresh = self._loss.fresh(self._held)
            was, now = (self._of(behind, loss).value for loss in (self._loss, fresh))
            if not math.isclose(was, now, rel_tol=self._close(tried)):
                how = f"it is {was:.10g} for rows after others, and {now:.10g} for them alone"
                raise OwnObjectError(self._keeps_state(how))

    def look(self, graph: Graph, outputs: tuple[Tensor, ...], targets: Any, rows: int) -> None:
        """Tries the loss on some rows of what a model has returned, and on several times that.

        Most calls are not looked at (`is_looked_at`).

        Raises:
            OwnObjectError: the loss of a row depends on other rows, or on weights.
        """
        self._calls += 1
        each = sum(output.numel() for output in outputs) // rows
        most = min(rows, max(2, min(MOST_ROWS, MOST_ELEMENTS // max(each, 1))))
        new = self._new(targets) if most > 1 else None
        if most < 2 or (new is None and not is_looked_at(self._calls)):
            return
        whole = Trial(graph, rows, tuple(widened(output.detach()) for output in outputs), targets)
        *_, behind = whole.cut(min(new or 0, rows - most))
        tried = next(behind.cut(most))
        with torch.enable_grad():
            for scale in SCALES:
                place = tried.scaled(scale)
                self._refuse_mixed([one for one in self._tried_at(place) if one.shows], place)

    def _new(self, targets: Any) -> int | None:
        """The first row that has a value of targets that was not tried."""
        if self._news == MOST_NEW:
            return None
        rows = [(row, value) for value, row in _values(targets) if value not in self._known]
        self._known |= {value for _, value in rows}
        self._news += bool(rows)
        return min(rows)[0] if rows else None

    def _check_calls(self, tried: Trial) -> None:
        """Checks what one call tells: that it has a gradient, and leaves nothing behind."""
        first = self._of(tried)
        state, drawn = self._state(), Generators.now()
        with Reads(self._held) as reads:
            again = self._of(tried)
        name = self._loss.name
        if moving := drawn.moved():
            raise OwnObjectError(
                f"loss {name} draws random numbers ({', '.join(moving)}), which each rank would "
                "draw for its own rows: draw in the model, whose random numbers follow from the "
                "seed and the sample, or in the data set"
            )
        if changed := moved(state, self._state()):
            raise OwnObjectError(self._keeps_state(f"a call changes {', '.join(changed)}"))
        if reads.names:
            raise OwnObjectError(
                f"loss {name} reads {reads.names[0]!r} of the model itself. Ranks have a copy of "
                f"it, which nothing updates: {_RECIPE}"
            )
        if not first.depends:
            raise OwnObjectError(
                f"loss {name} has no gradient for {tried}: argmax, a comparison, detach() or "
                ".item() is on its way from the outputs; take one that has, say cross-entropy of "
                "the scores, and give this one as metrics="
            )
        if not math.isfinite(first.value):
            raise OwnObjectError(
                f"loss {name} is {first.value} for {tried}; outputs were between 0 and 1"
            )
        if not math.isclose(first.value, again.value, rel_tol=ELSEWHERE):
            raise OwnObjectError(
                f"loss {name} is {first.value:.6g} and then {again.value:.6g} for the same rows: "
                "it must depend on its arguments alone, the outputs and the targets"
            )

    def _keeps_state(self, how: str) -> str:
        return (
            f"loss {self._loss.name} keeps state: {how}. Each rank has a copy of its own, which "
            "meets the rank's own rows: give what the loss needs in the targets, or as an output "
            "of the model; what is only logged is a metric, metrics={...}"
        )

    def _state(self) -> dict[str, Any]:
        walk = Walk()
        return {k: v for each in self._loss.functions for k, v in walk.of(each, "it").items()}

    def _places(self, tried: Trial) -> Iterator[Trial]:
        """Other outputs for the same targets."""
        generator = torch.Generator().manual_seed(1)
        around = tried.drawn(generator)
        if tried.elements > MOST_ELEMENTS:
            near, far = self._descended(around, 1.0, STEPS[:1]), around.scaled(10.0)
            yield near
            yield near.beside(far, tried.rows // 2)
            return
        yield around.scaled(10.0)
        near, far = (self._descended(around, sign, STEPS) for sign in (1.0, -1.0))
        if not self._is_finite(near):  # it takes nothing but probabilities
            near, far = (
                self._descended(tried, sign, STEPS, within=(1e-3, 1 - 1e-3)) for sign in (1.0, -1.0)
            )
        yield near
        yield far
        yield near.beside(far, tried.rows // 2)
        yield far.beside(near, tried.rows // 3)
        yield near.towards(far)

    def _descended(
        self,
        tried: Trial,
        sign: float,
        steps: Sequence[float],
        within: tuple[float, float] = (-math.inf, math.inf),
    ) -> Trial:
        """Outputs for which the loss is lower, or higher, as far as it can be computed."""
        for size in steps:
            try:
                found = self._of(tried)
            except Exception:  # whatever it is that the loss does not take
                return tried
            size *= min(1.0, within[1] - within[0])
            outputs = tuple(
                (output - sign * size * gradient.nan_to_num(0.0).sign()).clamp(*within)
                for output, gradient in zip(tried.outputs, found.gradients, strict=True)
            )
            tried = replace(tried, outputs=outputs)
        return tried

    def _is_finite(self, tried: Trial) -> bool:
        try:
            return math.isfinite(self._of(tried).value)
        except Exception:  # whatever it is that the loss does not take
            return False

    def _tried_at(self, tried: Trial) -> list["_Parted"]:
        """Some cuts of a batch at a place that the loss may not have been made for."""
        try:
            return self._cuts(tried, pairs=2)
        except OwnObjectError:
            raise
        except Exception:  # whatever it is that the loss does not take
            return []

    def _cuts(self, tried: Trial, pairs: int) -> list["_Parted"]:
        places = {tried.rows // 2, tried.rows // 3, self._batch_size}
        cuts = [self._parted(tried, at) for at in sorted(places) if 0 < at < tried.rows]
        cuts = cuts or [self._parted(tried, 0)]
        return cuts + [self._parted(pair, 1) for pair in tried.pairs(pairs)]

    def _refuse_mixed(self, every: Sequence["_Parted"], tried: Trial) -> None:
        # Values say more than gradients.
        unlike = [one for one in every if not one.adds_up]
        unlike += [one for one in every if not one.is_sum]
        if unlike:
            raise OwnObjectError(self._mixed(unlike[0], every, _broadcast(tried)))

    def _mixed(self, first: "_Parted", every: Sequence["_Parted"], broadcast: str) -> str:
        """Says that some parts do not make up a whole, and what may be meant."""
        loss = self._loss
        name = "sum" if loss.is_mean else "mean"
        hint = broadcast or (
            f"it is their {name}: say Loss(..., reduction={name!r})"
            if all(one.otherwise(mean=loss.is_mean).is_sum for one in every)
            else "loss=CrossEntropy(ignore_index=..., weight=...) counts labels of the whole batch"
            if isinstance(loss.functions[0], nn.CrossEntropyLoss)
            else "if it weighs rows by their targets, or leaves some out, let it give a value for "
            "each row, and Loss(..., weights=function of the targets)"
        )
        values = first.whole.value, sum(part.value for part in first.parts)
        shown = [loss.of_all(value, first.weight) for value in values]
        rows = f"of {first.whole.rows} rows"
        found = (
            f"loss {loss.name} {rows} has another gradient than by halves"
            if first.adds_up
            else f"loss {loss.name} {rows} is {shown[0]:.10g}, and {shown[1]:.10g} by halves"
        )
        low, high = _range(first.outputs)
        return (
            f"{found}: the loss of a row must not depend on others, which other ranks have; {hint} "
            f"(outputs were from {low:.3g} to {high:.3g})"
        )

    def _failed(self, tried: Trial, error: Exception) -> str:
        text = f"loss {self._loss.name} fails for {tried}: {type(error).__name__}: {error}"
        if "process group" not in str(error):
            return text
        return f"{text}. A loss must not communicate: the gradients of all ranks are added up"

    def _parted(self, tried: Trial, at: int) -> "_Parted":
        """The sum over rows, and over those up to this one and after it."""
        whole, weight = self._of(tried), self._loss.weight(tried.targets, tried.rows)
        parts = [self._of(part) for part in tried.cut(at)]
        found = _Parted(tried.outputs, whole, parts, weight, self._close(tried))
        if found.shows:
            every = [one.value / one.rows for one in found.parts]
            losses = min(every), max(every)
            seen = Seen(_range(tried.outputs), losses, self._loss.by_row)
            self._given.seen = seen.joined(self._given.seen)
        return found

    def _close(self, tried: Trial) -> float:
        return CLOSE.get(tried.outputs[0].dtype, CLOSE[torch.float32])

    def _of(self, tried: Trial, loss: OwnLoss | None = None) -> "_Sum":
        leaves = tuple(output.detach().requires_grad_() for output in tried.outputs)
        # As in a step, what the function gets is no leaf, into which it could not write.
        given = tried.graph.arranged([leaf.clone() for leaf in leaves])
        found = (loss or self._loss).summed(given, tried.targets, tried.rows)
        self._refuse_other_leaves(found, leaves)
        each: tuple[Tensor | None, ...] = (None,) * len(leaves)
        if found.requires_grad:
            each = torch.autograd.grad(found, leaves, allow_unused=True)
        both = zip(each, leaves, strict=True)
        gradients = tuple(torch.zeros_like(leaf) if one is None else one for one, leaf in both)
        return _Sum(tried.rows, found.item(), gradients, any(one is not None for one in each))

    def _refuse_other_leaves(self, found: Tensor, own: Sequence[Tensor]) -> None:
        """Checks that gradients flow to the outputs alone."""
        ids = set(map(id, own))
        for leaf in _leaves(found):
            if id(leaf) not in ids:
                raise OwnObjectError(
                    f"loss {self._loss.name} depends on a tensor of shape {tuple(leaf.shape)} that "
                    "requires a gradient and is no output of the model. Ranks have a copy of it, "
                    f"which nothing updates: {_RECIPE}; a constant needs requires_grad=False"
                )


@dataclass(frozen=True)
class _Sum:
    """What a loss sums up over some rows.

    Attributes:
        gradients: the sum's for each output [rows, ...]; zeros for one that it does not depend on.
    """

    rows: int
    value: float
    gradients: tuple[Tensor, ...]
    depends: bool

    def times(self, factor: float) -> "_Sum":
        """The same, were the loss so many times what it is."""
        gradients = tuple(factor * gradient for gradient in self.gradients)
        return replace(self, value=factor * self.value, gradients=gradients)


@dataclass(frozen=True)
class _Parted:
    """What a loss sums up over some rows, and over parts of them.

    Attributes:
        close: the relative difference that is rounding.
    """

    outputs: tuple[Tensor, ...]
    whole: _Sum
    parts: Sequence[_Sum]
    weight: float
    close: float

    @property
    def shows(self) -> bool:
        """Whether there is something to compare: the loss of all rows is a number."""
        return math.isfinite(self.whole.value)

    @property
    def is_sum(self) -> bool:
        """Whether the parts make up the whole, and so do their gradients."""
        return self.adds_up and self._joins

    @property
    def adds_up(self) -> bool:
        """Whether the parts make up the whole."""
        values = [part.value for part in self.parts]
        size = max(abs(self.whole.value), sum(map(abs, values)), 1e-6)
        return abs(self.whole.value - sum(values)) <= self.close * size

    @property
    def _joins(self) -> bool:
        """Whether each part has the gradient that the whole has for its rows."""
        each = zip(*(part.gradients for part in self.parts), strict=True)
        return all(
            self._are_close(whole, torch.cat(parts))
            for whole, parts in zip(self.whole.gradients, each, strict=True)
        )

    def _are_close(self, whole: Tensor, found: Tensor) -> bool:
        """Whether they differ by rounding, and where that decides which part of a kink is taken.

        NaN and infinity, as a root has at 0, are alike.
        """
        if not torch.equal(whole.isfinite(), found.isfinite()):
            return False
        whole, found = (each.nan_to_num(0.0, 0.0, 0.0) for each in (whole, found))
        size = max(whole.norm().item(), 1e-6)
        return (whole - found).norm().item() <= KINKS * self.close * size

    def otherwise(self, *, mean: bool) -> "_Parted":
        """The same, were the loss a sum of what is said to be a mean, or the other way round."""
        rows = self.whole.rows
        factors = [rows / part.rows if mean else part.rows / rows for part in self.parts]
        parts = [part.times(by) for part, by in zip(self.parts, factors, strict=True)]
        return replace(self, parts=parts)


def _leaves(found: Tensor) -> Iterator[Tensor]:
    if found.grad_fn is None:
        if found.requires_grad:
            yield found
        return
    left, known = [found.grad_fn], set[Any]()
    while left:
        node = left.pop()
        if node in known:
            continue
        known.add(node)
        if (variable := getattr(node, "variable", None)) is not None:
            yield variable
        left += [each for each, _ in node.next_functions if each is not None]


def _values(targets: Any) -> Iterator[tuple[tuple[int, float], int]]:
    """Values that targets have, each with a row that has it: of numbers that are real, the sign."""
    for place, leaf in enumerate(tree_leaves(targets)):
        if not isinstance(leaf, Tensor) or not leaf.numel() or not leaf.ndim or leaf.is_complex():
            continue
        real = leaf.is_floating_point()
        rows = (leaf.sign().nan_to_num(2.0) if real else leaf).reshape(len(leaf), -1)
        found, where = torch.unique(rows, return_inverse=True)
        first = torch.full(found.shape, len(leaf)).to(where)
        owner = torch.arange(len(leaf)).to(where)[:, None].expand_as(where)
        first.scatter_reduce_(0, where.reshape(-1), owner.reshape(-1), "amin")
        yield from zip(((place, value) for value in found.tolist()), first.tolist(), strict=True)


def _range(outputs: Sequence[Tensor]) -> tuple[float, float]:
    ends = [end.item() for each in outputs if each.numel() for end in torch.aminmax(each)]
    return (min(ends), max(ends)) if ends else (0.0, 0.0)


def _broadcast(tried: Trial) -> str:
    """Why rows may meet each other: outputs and targets of other shapes are made to fit."""
    output, targets = tried.outputs[0], tried.targets
    if not isinstance(targets, Tensor) or output.shape == targets.shape:
        return ""
    try:
        both = torch.broadcast_shapes(output.shape, targets.shape)
    except RuntimeError:
        return ""
    if not targets.is_floating_point() or both == output.shape:
        return ""
    shapes = f"outputs are {tuple(output.shape)} and targets {tuple(targets.shape)}"
    return (
        f"{shapes}, which torch broadcasts to {tuple(both)}: give both one shape, as in "
        "loss=lambda outputs, targets: function(outputs.squeeze(1), targets)"
    )
