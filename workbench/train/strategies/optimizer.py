"""From an experiment's optimizer to torch's, and its state as named tensors and back.

The state of a parameter is cut as the parameter is, so a checkpoint holds it as logical
tensors of their own, named `optimizer/<state>/<parameter>`:

    sgd           momentum_buffer (none without momentum)
    adam, adamw   step (one number), exp_avg, exp_avg_sq

An `Updater` is one rank's optimizer: which parameters it moves, and what it remembers of them.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from workbench.comm.algorithms.owned import Owned
from workbench.layers.cut_model import CutModel
from workbench.plan.experiment import SGD, Adam, AdamW, Optimizer
from workbench.plan.experiment import Optimizer as OptimizerValue

# Where torch has one kernel for a whole update.
_FUSED_ON = ("cpu", "cuda")


def build_optimizer(
    value: OptimizerValue, parameters: Iterable[nn.Parameter]
) -> torch.optim.Optimizer:
    """The torch optimizer of this value, fused where torch can.

    Args:
        value: of an `Experiment`.
        parameters: this rank's pieces; those of size zero are left out, and there may be none
            left, as on a rank that owns nothing.
    """
    held = [parameter for parameter in parameters if parameter.numel() > 0]
    fused = all(p.is_floating_point() and p.device.type in _FUSED_ON for p in held)
    build = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}
    options: dict[str, Any] = value.model_dump(exclude={"kind"})
    return build[value.kind]([{"params": held}], **options, fused=fused or None)


def state_names(value: OptimizerValue) -> tuple[str, ...]:
    """What the optimizer remembers of each parameter."""
    match value:
        case SGD():
            return ("momentum_buffer",) if value.momentum > 0 else ()
        case Adam() | AdamW():
            return ("step", "exp_avg", "exp_avg_sq")


def entry(state: str, name: str) -> str:
    """The logical tensor that holds this state of the parameter `name`."""
    return f"optimizer/{state}/{name}"


def state_tensors(
    optimizer: torch.optim.Optimizer, value: OptimizerValue, parameters: Mapping[str, nn.Parameter]
) -> dict[str, Tensor]:
    """The state of these parameters, by entry; the tensors are the optimizer's own.

    A parameter that was never updated has its state in full as well: zeros, from which all
    three optimizers take the same first step as from no state. One of size zero has none.
    """
    return {
        entry(state, name): _held(optimizer, parameter, state)
        for name, parameter in parameters.items()
        if parameter.numel() > 0
        for state in state_names(value)
    }


def load_state(
    optimizer: torch.optim.Optimizer,
    value: OptimizerValue,
    parameters: Mapping[str, nn.Parameter],
    read: Callable[[str, str], Tensor],
) -> None:
    """Puts back what `state_tensors` gave.

    Args:
        optimizer: a new one, of `value`.
        value: what it was built from.
        parameters: that it updates, by name; others may be among them if of size zero.
        read: (state, name) -> this rank's piece of that state; it becomes the optimizer's own.
    """
    names = {id(parameter): name for name, parameter in parameters.items()}
    content = optimizer.state_dict()
    content["state"] = {
        index: {state: read(state, names[id(parameter)]) for state in state_names(value)}
        for index, parameter in enumerate(optimizer.param_groups[0]["params"])
    }
    optimizer.load_state_dict(content)


def _held(optimizer: torch.optim.Optimizer, parameter: nn.Parameter, state: str) -> Tensor:
    held = optimizer.state[parameter].get(state) if parameter in optimizer.state else None
    if held is not None:
        return held
    return torch.zeros(()) if state == "step" else torch.zeros_like(parameter)


class Updater:
    """Moves this rank's parameters by their gradients.

    Args:
        value: the experiment's optimizer.
        model: this rank's part.
        held: what it moves, by name: the parameters of `model`, or parts of them.
    """

    def __init__(self, value: Optimizer, model: CutModel, held: Mapping[str, nn.Parameter]) -> None:
        self.value, self.model, self.held = value, model, held
        self.optimizer = build_optimizer(value, held.values())

    def step(self) -> None:
        """Moves every parameter that has a gradient; all ranks call it."""
        self.optimizer.step()

    def state(self, wanted: Collection[str]) -> dict[str, Tensor]:
        """What is remembered of this rank's pieces, by entry; all ranks call it.

        Args:
            wanted: the entries that must be there; there may be others.
        """
        return state_tensors(self.optimizer, self.value, self.held)

    def load(self, read: Callable[[str, str], Tensor]) -> None:
        """Puts back what was remembered.

        Args:
            read: (state, name) -> this rank's piece of that state.
        """
        load_state(self.optimizer, self.value, self.held, read)

    @property
    def owned(self) -> Mapping[tuple[str, ...], Owned]:
        """Where gradients are summed by who moves them, by the names of those that travel together.

        All others are summed on every rank.
        """
        return {}

    def tensors(self) -> Iterator[Tensor]:
        """What is remembered on this rank, for the account of memory."""
        for held in self.optimizer.state.values():
            yield from (value for value in held.values() if isinstance(value, Tensor))
