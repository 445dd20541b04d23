"""Contexts in a model's forward: operations without gradients, and in full precision.

A graph records operations, not what they are under. So an operation under `torch.no_grad()`, or
under `torch.autocast(..., enabled=False)`, is recorded as a function that enters the context.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

_DEVICES = ("cpu", "cuda")


@dataclass(frozen=True)
class Context:
    """What operations are under.

    Attributes:
        gradients: whether their gradients are recorded.
        autocast: whether autocast may choose their precision.
    """

    gradients: bool = True
    autocast: bool = True

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Enters the context, whatever it is entered from."""
        were = {device: torch.is_autocast_enabled(device) for device in _DEVICES}
        with torch.set_grad_enabled(self.gradients and torch.is_grad_enabled()):
            try:
                for device in were if not self.autocast else ():
                    torch.set_autocast_enabled(device, False)
                yield
            finally:
                for device, was in were.items():
                    torch.set_autocast_enabled(device, was)


@dataclass(frozen=True)
class Under:
    """A function that runs an operation under a context.

    Attributes:
        target: the function; of a method, its name.
        context: the context.
    """

    target: Any
    context: Context

    @property
    def __name__(self) -> str:
        """The name of the operation, after the context's."""
        name = getattr(self.target, "__name__", self.target)
        return f"no_autocast_{name}" if self.context.gradients else f"no_grad_{name}"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the operation."""
        with self.context.entered():
            if isinstance(self.target, str):
                return getattr(args[0], self.target)(*args[1:], **kwargs)
            return self.target(*args, **kwargs)


@contextmanager
def autocast_watched(disabled: list[str]) -> Iterator[None]:
    """Keeps a list of the devices for which autocast is disabled, from the outermost on."""
    cls: Any = torch.autocast
    enter, leave = cls.__enter__, cls.__exit__

    def entered(self: Any) -> Any:
        if not self._enabled:
            disabled.append(self.device)
        return enter(self)

    def left(self: Any, *error: Any) -> Any:
        if not self._enabled:
            disabled.pop()
        return leave(self, *error)

    cls.__enter__, cls.__exit__ = entered, left
    try:
        yield
    finally:
        cls.__enter__, cls.__exit__ = enter, leave


def modes() -> tuple[bool, ...]:
    """Whether gradients are recorded, and whether autocast is on, on each device."""
    autocast = (torch.is_autocast_enabled(device) for device in _DEVICES)
    return torch.is_grad_enabled(), *autocast
