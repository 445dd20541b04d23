"""An experiment as fields with names, and the fields in which several differ: for tables."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from workbench.plan.experiment.experiment import Experiment
from workbench.plan.io.value import Value
from workbench.plan.plans.plan import Plan

Shown = str | int | float | bool | None


def short(value: Any) -> Shown:
    """What a name, or a table, shows of a value."""
    if isinstance(value, Plan):
        sizes = sorted({layer.group_size for layer in value.layers.values()} - {1})
        cut = f"cut over {'/'.join(map(str, sizes))}" if sizes else "data parallel"
        return f"{cut}, {value.world_size} ranks"
    if isinstance(value, Value):
        return repr(value)
    if isinstance(value, Mapping) and value.keys() == {"name", "file"}:
        return _own(**value)
    if isinstance(value, Mapping) and "own" in value:
        return _own(**value["own"]) + ", with error feedback" * value["error_feedback"]
    return value if isinstance(value, int | float | str | None) else str(value)


def _own(name: str, file: str) -> str:
    """What is a person's own; its file's content tells versions of it apart."""
    called = name.rpartition(":")[2].rpartition(".")[2]
    return f"{called} ({Path(file).stem.rpartition('-')[2][:6]})" if file else called


def fields_of(experiment: Experiment) -> dict[str, Any]:
    """Its fields by name: those of its optimizer beside its own, of others as 'sync.every'."""
    fields = experiment.model_dump(exclude={"plan"})
    optimizer = fields.pop("optimizer")
    flat: dict[str, Any] = {"optimizer": optimizer.pop("kind"), **optimizer}
    for name, value in fields.items():
        inner = value.items() if isinstance(value, Mapping) else [("", value)]
        flat |= {f"{name}.{each}".removesuffix("."): short(one) for each, one in inner}
    return flat


def beside(fields: Mapping[str, Any], results: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of an experiment beside results: one named like a result is "experiment.steps"."""
    return {f"experiment.{n}" if n in results else n: value for n, value in fields.items()}


def differences(experiments: Sequence[Experiment]) -> list[dict[str, Any]]:
    """The fields of each experiment that are not the same in all, as a table shows them."""
    plans = _labels([each.plan for each in experiments])
    told = [
        {"plan": plan, **fields_of(each)} for plan, each in zip(plans, experiments, strict=True)
    ]
    return varied(told)


def varied(told: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Of several mappings, the entries that are not the same in all."""
    names = list(dict.fromkeys(name for each in told for name in each))
    differ = [name for name in names if len({repr(each.get(name)) for each in told}) > 1]
    return [{name: each.get(name) for name in differ} for each in told]


def layer_differences(plans: Sequence[Plan]) -> list[dict[str, Any]]:
    """How each plan has the layers that do not lie alike in all; nothing for different models."""
    if len({plan.graph.fingerprint for plan in plans}) > 1:
        return [{} for _ in plans]
    return varied([{f"layer {n}": str(c) for n, c in plan.layers.items()} for plan in plans])


def _labels(plans: Sequence[Plan]) -> list[str]:
    """A text for each plan; those that would look alike, and are not, are numbered."""
    alike: dict[str, list[str]] = {}
    found = []
    for plan in plans:
        label, text = str(short(plan)), plan.to_toml()
        texts = alike.setdefault(label, [])
        if text not in texts:
            texts.append(text)
        number = texts.index(text) + 1
        found.append(f"{label} ({number})" if number > 1 else label)
    return found
