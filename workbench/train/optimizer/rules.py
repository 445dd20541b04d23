"""What a strategy makes itself of gradients and of averaged weights, parameter by parameter.

Its states lie as the parameters do: each rank has those of its pieces, all that hold the same
piece have the same, and a checkpoint has each once, named as the optimizer's are. So a strategy
must work element by element, and keep nothing elsewhere. That is tried before the first step, on
drawn numbers: halves must give what the whole gives, the same must give the same again, and the
object must stay as it is.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor

from workbench.layers.cut_model import CutModel
from workbench.plan.experiment.sync import Strategy, SyncValue, Timing
from workbench.plan.extension.user_object import OwnObjectError

States = dict[str, Tensor]

_TRIED = 48
_STEPS = (0, 1, 7)
_RULES = ("gradient", "averaged")


class Rules:
    """Those of a rank's strategy, with all states of its pieces.

    Raises:
        OwnObjectError: the strategy does not work element by element.
    """

    def __init__(self, sync: SyncValue, model: CutModel) -> None:
        self.timing, self.strategy = sync.timing, sync.strategy
        self._parameters = {n: p for n, p in model.trainable().items() if p.numel() > 0}
        try_out(self.strategy, self.timing)
        self._states: dict[str, States] = {}
        self.begin()

    @classmethod
    def of(cls, sync: SyncValue, model: CutModel) -> "Rules | None":
        return cls(sync, model) if sync.timing.adjusts or sync.timing.corrects else None

    def begin(self) -> None:
        """All states are as in the beginning, with the weights that there are now."""
        self._states = {
            name: _begun(self.timing, parameter.detach())
            for name, parameter in self._parameters.items()
        }

    @torch.no_grad()
    def adjust(
        self, step: int, gradients: Mapping[str, Tensor], then: Mapping[str, Tensor] | None = None
    ) -> None:
        """Puts the strategy's gradients in the place of these.

        Args:
            then: the weights that they were computed at, where they are kept.

        Raises:
            OwnObjectError: the strategy changes weights, or states where weights are averaged, or
                gives no gradient of the parameter's shape.
        """
        for name, grad in gradients.items():
            if name not in self._parameters:
                continue
            weight, state = self._parameters[name].detach(), self._states[name]
            at = weight if then is None else then.get(name, weight)
            before = [*map(_version, (weight, at)), *map(_version, state.values())]
            found = _called(self.strategy, "gradient", name, state, step, grad, weight, at)
            after = [*map(_version, (weight, at)), *map(_version, state.values())]
            if before[:2] != after[:2]:
                raise OwnObjectError(
                    f"strategy {self.strategy.name!r}: gradient() changed the weights of {name!r}, "
                    "which the optimizer moves; it returns a gradient"
                )
            if self.timing.of_weights and before != after:
                raise OwnObjectError(
                    f"strategy {self.strategy.name!r}: gradient() changed a state of {name!r}, and "
                    "each rank has other gradients where weights are averaged; there it only "
                    "reads states, which averaged() may change"
                )
            _take(self.strategy, "gradient", name, found, grad)

    @torch.no_grad()
    def correct(self, step: int) -> None:
        """Puts the strategy's weights in the place of those that were averaged."""
        for name, parameter in self._parameters.items():
            mean = parameter.detach()
            found = _called(self.strategy, "averaged", name, self._states[name], step, mean)
            _take(self.strategy, "averaged", name, found, mean)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(map(stored_as, self.timing.remembers))

    def named(self) -> Iterator[tuple[str, str, Tensor]]:
        """(state, parameter, this rank's piece) of all that it remembers."""
        for name, states in self._states.items():
            yield from ((stored_as(kind), name, tensor) for kind, tensor in states.items())

    def load(self, read: Callable[[str, str], Tensor]) -> None:
        """Puts back what was remembered."""
        for kind, name, tensor in self.named():
            tensor.copy_(read(kind, name))


_PREFIX = "strategy."


def stored_as(kind: str) -> str:
    return _PREFIX + kind


def is_of_strategy(state: str) -> bool:
    return state.startswith(_PREFIX)


def _begun(timing: Timing, weight: Tensor) -> States:
    return {
        kind: weight.clone() if first == "weight" else torch.full_like(weight, first)
        for kind, first in timing.remembers.items()
    }


def _version(tensor: Tensor) -> int:
    return int(tensor._version)


def _called(strategy: Strategy, method: str, name: str, states: States, *given: Any) -> Any:
    """What a method returns; states that it has put there are in the place of the old ones."""
    shown: dict[str, Any] = dict(states)
    found = getattr(strategy, method)(*given, shown)
    if shown.keys() != states.keys():
        raise OwnObjectError(
            f"strategy {strategy.name!r}: {method}() left the states {', '.join(shown)} of "
            f"{name!r}, and remembers names {', '.join(states) or 'none'}"
        )
    for kind, tensor in shown.items():
        _take(strategy, f"{method}(), state {kind!r}", name, tensor, states[kind])
    return found


def _take(strategy: Strategy, what: str, name: str, found: Any, place: Tensor) -> None:
    if found is place:
        return
    if not isinstance(found, Tensor) or found.shape != place.shape:
        got = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
        raise OwnObjectError(
            f"strategy {strategy.name!r}: {what} must give a tensor of shape {tuple(place.shape)} "
            f"for {name!r}, got {got}"
        )
    place.copy_(found)


@torch.no_grad()
def try_out(strategy: Strategy, timing: Timing) -> None:
    """Tries a strategy's methods on drawn numbers.

    Raises:
        OwnObjectError: a method fails, mixes elements, is random, or changes the object.
    """
    for method in _RULES:
        if getattr(type(strategy), method) is getattr(Strategy, method):
            continue
        whole = _tried(strategy, timing, method, (slice(None),))
        halves = (slice(0, _TRIED // 3), slice(_TRIED // 3, None))
        for parts, why in (
            ((slice(None),), "the same way each time, and it gives another result for the same"),
            (
                halves,
                "element by element, and what it makes of two parts is not what it makes of the "
                "whole: a layer that is cut would be computed otherwise",
            ),
        ):
            again = _tried(strategy, timing, method, parts)
            for a, b in zip(whole, again, strict=True):
                if not torch.allclose(a, b, rtol=1e-9, atol=1e-12, equal_nan=True):
                    raise OwnObjectError(f"strategy {strategy.name!r}: {method}() must work {why}")


def _tried(strategy: Strategy, timing: Timing, method: str, parts: Sequence[slice]) -> list[Tensor]:
    try:
        return _trial(strategy, timing, method, parts)
    except OwnObjectError:
        raise
    except Exception as error:  # whatever its own code raises
        raise OwnObjectError(
            f"strategy {strategy.name!r}: {method}() failed on a trial of {_TRIED} drawn numbers: "
            f"{type(error).__name__}: {error}"
        ) from error


def _trial(strategy: Strategy, timing: Timing, method: str, parts: Sequence[slice]) -> list[Tensor]:
    """What a method makes of some numbers in a few steps, part by part, and its states then."""
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randn(_TRIED, dtype=torch.float64, generator=generator) for _ in range(6)]
    found: list[list[Tensor]] = []
    for part in parts:
        own = deepcopy(strategy)
        begun = dict(vars(own))
        weight, then, *values = (each[part].clone() for each in drawn)
        then = then if timing.keeps_weights else weight
        states, made = _begun(timing, weight), list[Tensor]()
        for step, value in zip(_STEPS, values, strict=False):
            given = (value, weight, then) if method == "gradient" else (value,)
            result = _called(own, method, "a trial", states, step, *given)
            _take(own, f"{method}()", "a trial", result, value)
            made.append(value.clone())
        changed = [n for n, value in vars(own).items() if begun.get(n, own) is not value]
        if changed:
            raise OwnObjectError(
                f"strategy {strategy.name!r}: {method}() changed self.{changed[0]}, which no "
                "checkpoint has and no other rank; what is to be remembered goes into a state"
            )
        found.append([*made, *states.values()])
    return [torch.cat(several) for several in zip(*found, strict=True)]
