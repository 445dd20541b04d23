"""Strategies: when ranks exchange gradients or weights, and what is made of what they exchanged.

The built-in ones (`sync.py`) are such strategies, and so is one of a person's own. What happens in
a step follows from a strategy's `Timing` alone, which is text: the program of a step is written
from it, and traffic, memory and time are predicted, wherever the strategy itself is not there.

    exchanges   every   late   a step
    gradients   1       0      sums gradients over replicas, and uses them
    gradients   n       0      adds its gradient up; each n-th sums all over replicas and uses them
    gradients   1       n      starts a sum, and uses the one that was started n steps ago
    weights     n       0      uses its own gradients; each n-th averages weights over replicas

What a strategy computes itself, it computes element by element, and of what all ranks that hold
the same piece have alike. So the result of a piece is the piece of the result, however layers are
cut, and replicas stay equal bit by bit.
"""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, FiniteFloat, model_validator

from workbench.plan.errors import ExperimentError
from workbench.plan.extension.extension import Extension
from workbench.plan.value import Value

Exchanges = Literal["gradients", "weights"]
Momentum = Literal["keep", "average", "reset"]
First = FiniteFloat | Literal["weight"]
"""What a state begins with: this number in every element, or the weights as they are then."""


class Timing(Value):
    """When ranks exchange what, when it is used, and what a strategy remembers: see `Strategy`."""

    exchanges: Exchanges = "gradients"
    every: int = Field(default=1, ge=1)
    late: int = Field(default=0, ge=0)
    warmup: int = Field(default=0, ge=0)
    momentum: Momentum = "keep"
    keeps_weights: bool = False
    remembers: dict[str, First] = Field(default_factory=dict)
    temporaries: int = Field(default=3, ge=0)
    adjusts: bool = False
    """Whether gradients go through `Strategy.gradient`."""
    corrects: bool = False
    """Whether averaged weights go through `Strategy.averaged`."""

    @classmethod
    def of(cls, strategy: "Strategy") -> Self:
        """That of a strategy.

        Raises:
            ExperimentError: an attribute has a wrong type or value, or two exclude each other.
        """
        own = type(strategy)
        try:
            return cls(
                **{name: getattr(strategy, name) for name in _STATED},
                remembers=dict(strategy.remembers),
                adjusts=own.gradient is not Strategy.gradient,
                corrects=own.averaged is not Strategy.averaged,
            )
        except ExperimentError as error:
            raise ExperimentError(f"strategy {strategy.name!r}: {error}") from None

    def __hash__(self) -> int:
        return hash((self.exchanges, self.every, self.late, *self.remembers.items()))

    @property
    def of_weights(self) -> bool:
        """Whether ranks move weights by themselves, and average them."""
        return self.exchanges == "weights"

    @property
    def adds_up(self) -> bool:
        """Whether gradients of several steps are added up before they are summed."""
        return self.every > 1 and not self.of_weights

    def begins(self, step: int) -> bool:
        """Whether nothing of the steps before is added up when a step begins."""
        return step <= self.warmup or step % self.every == 0

    @model_validator(mode="after")
    def _is_possible(self) -> Self:
        for name in self.remembers:
            if not name.isidentifier():
                raise ValueError(f"remembers: a state is called like a variable, got {name!r}")
        if self.of_weights and (self.late or self.keeps_weights):
            raise ValueError(
                "late and keeps_weights are about sums of gradients, and exchanges='weights' "
                "sums none; they are valid with exchanges='gradients'"
            )
        if self.late and self.every > 1:
            raise ValueError(
                f"late={self.late} and every={self.every} exclude each other: sums are used late "
                "where each step starts one; every=1 is valid, or late=0"
            )
        if self.keeps_weights and not self.late:
            raise ValueError("keeps_weights is about gradients that are late; late >= 1 is valid")
        if self.momentum != "keep" and not self.of_weights:
            raise ValueError(
                f"momentum={self.momentum!r} is about ranks whose optimizers differ; it is valid "
                "with exchanges='weights'"
            )
        if self.corrects and not self.of_weights:
            raise ValueError(
                "averaged() is called where weights are averaged: with exchanges='weights'"
            )
        if self.remembers and not (self.adjusts or self.corrects):
            raise ValueError("remembers names states, and no method of the strategy uses one")
        return self


class Strategy(Extension):
    """When gradients are summed and used: the base class of all strategies, also of your own.

    Attributes are set in the class, or on the object. For example, local SGD with an outer
    momentum (SlowMo, Wang et al. 2020, arXiv:1910.00643; DiLoCo, arXiv:2311.08105):

        class SlowMo(wb.extend.Strategy):
            exchanges = "weights"
            every = 8
            remembers = {"slow": "weight", "speed": 0.0}

            def averaged(self, step, mean, state):
                state["speed"].mul_(0.7).add_(state["slow"] - mean)
                state["slow"].sub_(state["speed"])
                return state["slow"]

    Both methods are called for each parameter, with this rank's piece of it, and work element by
    element: they do not look at shapes, sums or indices. They may change a state in place, or put
    another tensor of the same shape there. What they return is used instead of the gradient, or of
    the weights; it may be an argument, changed in place. They are called without autograd.

    Attributes:
        exchanges: "gradients" are summed over the ranks that hold the same piece, or "weights" are
            averaged over them, weighted by the rows that each has seen.
        every: the steps from one exchange to the next. Gradients in between are added up (a sum,
            not a mean), and weights move once in so many steps. Weights that are averaged move in
            every step, by the rank's own gradients.
        late: how many steps after its own a sum of gradients is used.
        warmup: the number of first steps that are those of `Synchronous`; methods are not called
            in them, and states begin after them.
        momentum: the optimizer's state when weights are averaged: unchanged, averaged too, or
            forgotten.
        keeps_weights: whether the weights are kept that a late gradient was computed at.
        remembers: the states of each parameter, by name, and what they begin with: a number, or
            "weight". They are saved, and cut like the parameter.
        temporaries: the tensors as large as a parameter that a method makes at one time at most,
            for the prediction of memory.
        inexact: why the result differs from that of one process; "": it does not; None: nothing is
            claimed, and that it is one's own is said.

    Gradients that are added up are summed when a checkpoint is written between two exchanges, and
    weights are then averaged, without `averaged`: runs that save at other steps differ, and one
    that is resumed equals the uninterrupted one.
    """

    kind: ClassVar[str] = "strategies"
    exchanges: Exchanges = "gradients"
    every: int = 1
    late: int = 0
    warmup: int = 0
    momentum: Momentum = "keep"
    keeps_weights: bool = False
    remembers: Mapping[str, First] = {}
    temporaries: int = 3
    inexact: str | None = None

    def gradient(self, step: int, grad: Any, weight: Any, then: Any, state: dict[str, Any]) -> Any:
        """The gradient that a weight moves by: clipped afterwards, and given to the optimizer.

        With exchanges="weights" it is the rank's own, and states are only read: else they would
        differ between ranks.

        Args:
            step: the step that moves the weights.
            grad: the sum over the batch, of this step or of a late one.
            weight: the weights that are to move.
            then: the weights that a late gradient was computed at, with `keeps_weights`; else
                `weight`.
            state: the states of the parameter, by name.
        """
        return grad

    def averaged(self, step: int, mean: Any, state: dict[str, Any]) -> Any:
        """The weights to go on from after an averaging.

        Args:
            step: the step that ends with it.
            mean: the mean over the replicas.
            state: the states of the parameter, by name.
        """
        return mean


_STATED = ("exchanges", "every", "late", "warmup", "momentum", "keeps_weights", "temporaries")


class Averaging(Strategy):
    """Local SGD as a strategy.

    Args:
        every: steps between two averagings.
        momentum: the optimizer's state at an averaging.
    """

    exchanges: Exchanges = "weights"

    def __init__(self, every: int, momentum: Momentum) -> None:
        self.every, self.momentum = every, momentum


class Late(Strategy):
    """Pipelined steps as a strategy.

    Args:
        late: how many steps later a sum is used.
        warmup: the number of first steps that are synchronous.
    """

    def __init__(self, late: int, warmup: int) -> None:
        self.late, self.warmup = late, warmup


class Compensated(Late):
    """The same with delay compensation.

    Args:
        late: how many steps later a sum is used.
        warmup: the number of first steps that are synchronous.
        strength: the factor of the correction.

    Source: Zheng et al. 2017 (arXiv:1609.08326), as in SAPipe (2022).
    """

    keeps_weights = True

    def __init__(self, late: int, warmup: int, strength: float) -> None:
        super().__init__(late, warmup)
        self.strength = strength

    def gradient(self, step: int, grad: Any, weight: Any, then: Any, state: dict[str, Any]) -> Any:
        """Corrected, element by element, for how far the weights have moved since."""
        return grad.add_(self.strength * grad * grad * (weight - then))
