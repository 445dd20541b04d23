"""One experiment with several values of its fields, as the experiments that they make."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

from workbench.plan.errors import ExperimentError
from workbench.plan.experiment import Experiment
from workbench.plan.plan import Plan
from workbench.plan.value import Value


@dataclass(frozen=True)
class Variation:
    """One of a sweep's experiments.

    Attributes:
        experiment: what runs.
        values: what was chosen for it, by name.
        name: the same for people, "lr=0.1, seed=2".
    """

    experiment: Experiment
    values: Mapping[str, Any]
    name: str


def sweep(experiment: Experiment, **values: Iterable[Any]) -> tuple[Variation, ...]:
    """Every combination of values, the last name varying fastest.

    Args:
        experiment: what is varied.
        values: by the name of one of the experiment's fields (`plan`, `batch_size`, `sync`, ...)
            or of its optimizer's (`lr`, `momentum`, ...).

    Raises:
        ExperimentError: a name that neither has, no values for one, or a combination that cannot
            be; the text says which.
    """
    choices = {name: _several(name, each) for name, each in values.items()}
    return tuple(
        _varied(experiment, dict(zip(choices, each, strict=True)))
        for each in product(*choices.values())
    )


def short(value: Any) -> str | int | float | bool | None:
    """What a name, or a table, shows of a value."""
    if isinstance(value, Plan):
        sizes = sorted({layer.group_size for layer in value.layers.values()} - {1})
        cut = f"cut over {'/'.join(map(str, sizes))}" if sizes else "data parallel"
        return f"{cut}, {value.world_size} ranks"
    if isinstance(value, Value):
        return repr(value)
    return value if isinstance(value, int | float | str | None) else str(value)


def _several(name: str, values: Iterable[Any]) -> list[Any]:
    if isinstance(values, str | Mapping | Value) or not isinstance(values, Iterable):
        raise ExperimentError(f"{name}: a list of values is needed, got {values!r}; [{values!r}]?")
    if not (found := list(values)):
        raise ExperimentError(f"{name}: a list of values is needed, got none")
    return found


def _varied(experiment: Experiment, values: Mapping[str, Any]) -> Variation:
    own = {name: each for name, each in values.items() if name in Experiment.model_fields}
    rest = {name: each for name, each in values.items() if name not in own}
    optimizer = own.pop("optimizer", experiment.optimizer)
    known = type(optimizer).model_fields
    if strangers := sorted(rest.keys() - known.keys()):
        valid = ", ".join(sorted({*Experiment.model_fields, *known}))
        raise ExperimentError(
            f"neither an experiment nor its {type(optimizer).__name__} has "
            f"{', '.join(strangers)}; there are {valid}"
        )
    name = ", ".join(f"{name}={short(each)}" for name, each in values.items())
    try:
        varied = experiment.replace(optimizer=optimizer.replace(**rest), **own)
    except ValueError as error:
        raise ExperimentError(f"{name}: {error}") from None
    return Variation(varied, values, name)
