"""From a `Source` to a module: with values, or its structure alone."""

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from workbench.model.errors import ModelError
from workbench.model.packing import unpack
from workbench.model.structure import structure
from workbench.model.vision import torchvision
from workbench.plan.graph import Source, unknown

# What parameters are made with. Everything else runs as it is, for it may decide the structure:
# RegNet computes its widths with tensors, and reads them.
_MAKES_PARAMETERS = {
    torch.empty,
    torch.zeros,
    torch.ones,
    torch.full,
    torch.rand,
    torch.randn,
}


class _WithoutMemory(TorchFunctionMode):
    """Makes parameters on the meta device, where initializing them does nothing."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in _MAKES_PARAMETERS and kwargs.get("device") is None:
            kwargs["device"] = "meta"
        return func(*args, **kwargs)


def build(source: Source) -> nn.Module:
    """The model with torch's own initial values, drawn from torch's global generator.

    Raises:
        ModelError: an unknown name or argument, or the source is a user's module: its values
            are in the module alone.
    """
    if source.kind != "torchvision":
        raise ModelError(
            f"{source.name} is a module of your own: its values are in the module, "
            "and cannot be built from a name"
        )
    return _torchvision_model(source)


def build_fake(source: Source) -> nn.Module:
    """The model's structure, in training mode: parameters on the meta device, without memory.

    Raises:
        ModelError: as for `build`; or a user's module whose structure is not at hand.
    """
    if source.kind == "torchvision":
        with _WithoutMemory():
            return structure(_torchvision_model(source))
    if source.skeleton is None:
        raise ModelError(
            f"{source.name} is a module of your own, and text does not hold its structure: "
            "trace the module again, and give the graph along with the text"
        )
    return unpack(source.skeleton)


def named(name: str, input_shape: tuple[int, ...], arguments: dict[str, Any]) -> Source:
    """The source of a torchvision model, its arguments completed and checked.

    Args:
        name: of any classification model of `torchvision.models`.
        input_shape: one sample's; a builder that has to know the image's size is told it.
        arguments: further keyword arguments of the builder: plain values only.

    Raises:
        ModelError: no such model (the nearest are suggested), or arguments that are no values.
    """
    chosen = dict(arguments)
    accepted = _parameters(_builder(name))
    if "image_size" in accepted:
        chosen.setdefault("image_size", input_shape[-2])
    if "input_size" in accepted:
        chosen.setdefault("input_size", input_shape[-2:])
    if "weights" in chosen:
        raise ModelError(
            "weights= is not taken here: build the module with its weights, and trace that module"
        )
    values = tuple((key, _value(key, value)) for key, value in sorted(chosen.items()))
    return Source("torchvision", name, values)


def _value(key: str, value: Any) -> Any:
    """A plain value that can be compared, hashed and written as text."""
    if isinstance(value, list | tuple):
        return tuple(_value(key, item) for item in value)
    if not isinstance(value, bool | int | float | str):
        raise ModelError(
            f"argument {key}={value!r} is no plain value (number, text, true or false, list): "
            "build the module yourself, and trace that module"
        )
    return value


@cache
def _models() -> tuple[str, ...]:
    models = torchvision().models
    return tuple(models.list_models(module=models))


def _builder(name: str) -> Callable[..., nn.Module]:
    if name not in _models():
        raise ModelError(unknown("model", name, _models(), of="torchvision"))
    builder: Callable[..., nn.Module] = torchvision().models.get_model_builder(name)
    return builder


def _parameters(builder: Callable[..., nn.Module]) -> set[str]:
    """Names of the arguments that the builder passes on to the model's class."""
    model = inspect.signature(builder).return_annotation
    return set(inspect.signature(model).parameters)


def _torchvision_model(source: Source) -> nn.Module:
    arguments = dict(source.arguments)
    builder = _builder(source.name)
    if "init_weights" in _parameters(builder):
        # torchvision's default, said aloud: left out, GoogLeNet and Inception warn. It takes
        # 0.3 s and 0.6 s (the warning's "long initialization times" are of the past).
        arguments.setdefault("init_weights", True)
    try:
        return builder(weights=None, **arguments)
    except Exception as error:
        given = ", ".join(f"{key}={value!r}" for key, value in source.arguments)
        raise ModelError(f"{source.name} cannot be built with {given}: {error}") from error
