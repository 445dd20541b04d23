"""What a model's forward is given, one tensor or several by name, and what it returns."""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any

from torch import Tensor, nn
from torch.fx import Proxy

from workbench.model.errors import ModelError, TraceError
from workbench.plan.graph.graph import Input

KNOWN = (bool, int, float, complex, str, type(None))


def declared(
    shape: Sequence[int], vocabulary: int | None, several: Mapping[str, Any] | None
) -> tuple[Input, ...]:
    """The inputs that a model was said to have.

    Raises:
        ModelError: something else was given, or both.
    """
    try:
        if several is None:
            if not tuple(shape):
                raise ValueError(
                    "input_shape is one sample's shape without the batch, such as (3, 32, 32), "
                    "got ()"
                )
            return (Input(tuple(shape), vocabulary=vocabulary),)
        if vocabulary is not None:
            raise ValueError("vocabulary= is an Input's own where inputs= are given")
        if not isinstance(several, Mapping) or not several:
            raise ValueError(
                "inputs= gives an Input for each of forward's parameters that reads the batch, "
                f"{{'image': wb.Input((3, 32, 32)), ...}}, got {several!r}"
            )
        return tuple(_named(name, given) for name, given in several.items())
    except (TypeError, ValueError) as error:
        raise ModelError(str(error)) from None


def _named(name: str, given: Any) -> Input:
    if not isinstance(name, str) or not name.isidentifier():
        raise ValueError(f"inputs= are named as forward's parameters are, got {name!r}")
    return replace(given if isinstance(given, Input) else Input(given), name=name)


def parameters_of(root: nn.Module, given: Sequence[Input]) -> tuple[str, ...]:
    """The parameter of forward that each input is for; the others have their defaults.

    Raises:
        TraceError: forward has no such parameter, or one without a default is for none.
    """
    parameters = list(inspect.signature(root.forward).parameters.values())
    plain = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    required = [p.name for p in plain if p.default is p.empty]
    if not given[0].name:
        names = required or [p.name for p in parameters[:1]]
        if len(names) != 1:
            said = ", ".join(f"{name!r}: wb.Input(...)" for name in names)
            raise TraceError(
                f"forward takes {len(names)} inputs ({', '.join(names)}): say what each is, "
                f"inputs={{{said}}}; a model returns its predictions (the loss is computed outside)"
            )
        return tuple(names)
    names = [one.name for one in given]
    taken = [p.name for p in plain]
    if not any(p.kind is p.VAR_KEYWORD for p in parameters):
        for name in names:
            if name not in taken:
                raise TraceError(
                    f"forward has no parameter {name!r} to give an input to; it has "
                    f"{', '.join(taken)}"
                )
    for name in required:
        if name not in names:
            raise TraceError(
                f"forward's parameter {name!r} has no default and is for none of the inputs "
                f"({', '.join(names)}): declare it, inputs={{{name!r}: wb.Input(...), ...}}"
            )
    return tuple(names)


def called_whole(model: nn.Module, given: Sequence[Input], values: Sequence[Tensor]) -> Any:
    """What a whole model returns for a batch of each of its inputs."""
    if not given[0].name:
        return model(*values)
    return model(**{one.name: value for one, value in zip(given, values, strict=True)})


def without_objects(returned: Any) -> Any:
    """What a model returns; of a dict or dataclass, what holds tensors and plain values alone.

    Something else, as the cache of keys and values of a language model, can have no role.
    """
    if is_dataclass(returned) and not isinstance(returned, dict | type):
        returned = {one.name: getattr(returned, one.name) for one in fields(returned)}
    if not isinstance(returned, dict):
        return returned
    return {name: value for name, value in returned.items() if _is_plain(value)}


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict | tuple | list):
        return all(map(_is_plain, value.values() if isinstance(value, dict) else value))
    return isinstance(value, (Proxy, Tensor, *KNOWN))
