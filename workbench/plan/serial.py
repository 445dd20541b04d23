"""Plans and graphs as TOML, and back, with an error for every wrong entry."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, Protocol

from pydantic import ConfigDict, TypeAdapter
from pydantic.dataclasses import dataclass as checked

from workbench.plan.errors import PlanError, readable
from workbench.plan.extension.own import Own
from workbench.plan.graph import Graph, Layer, Source, Weight, unknown
from workbench.plan.placement.choice import LayerPlan
from workbench.plan.value import dump

_PLAN_KEYS = ("world_size", "batch_norm", "rounds", "row_shares", "model")


class PlanFields(Protocol):
    """The fields of a `Plan`."""

    @property
    def graph(self) -> Graph: ...

    @property
    def world_size(self) -> int: ...

    @property
    def layers(self) -> Mapping[str, LayerPlan]: ...

    @property
    def batch_norm(self) -> str: ...

    @property
    def rounds(self) -> str: ...

    @property
    def row_shares(self) -> tuple[float, ...] | None: ...


def to_toml(plan: PlanFields) -> str:
    """A plan as TOML: the choices first, then the model's description."""
    head = {
        "model": plan.graph.source.name,
        "world_size": plan.world_size,
        "batch_norm": plan.batch_norm,
        "rounds": plan.rounds,
    }
    if plan.row_shares is not None:
        head["row_shares"] = plan.row_shares
    choices = {name: _choice_entry(choice) for name, choice in plan.layers.items()}
    return (
        dump({"plan": head, "layers": choices})
        + "\n# The model, as traced. Written by the workbench; to be left as it is.\n"
        + dump({"graph": _graph_entries(plan.graph)})
    )


def read(content: Mapping[str, Any], graph: Graph | None) -> dict[str, Any]:
    """The fields of a Plan from parsed TOML.

    Raises:
        PlanError: a missing table, an unknown key, a wrong type, or another model.
    """
    head = content.get("plan")
    if not isinstance(head, dict):
        raise PlanError("no [plan] table in this text")
    for key in head:
        if key not in _PLAN_KEYS:
            raise PlanError(f"[plan]: {unknown('key', key, _PLAN_KEYS)}")
    described = _read_graph(content.get("graph"))
    if graph is None:
        graph = described
    if graph is None:
        raise PlanError("no [graph] table in this text: pass the graph that the plan is for")
    if described is not None and described.fingerprint != graph.fingerprint:
        raise PlanError(
            f"this plan is for {described!r} ({described.fingerprint}), "
            f"not for {graph!r} ({graph.fingerprint})"
        )
    entries = content.get("layers", {})
    if not isinstance(entries, dict):
        raise PlanError(f"[layers] must be a table of layers, got {entries!r}")
    layers = {}
    for name, entry in _flat(entries).items():
        with readable(PlanError, f"layer {name!r}"):
            layers[name] = _CHOICE.validate_python(entry, strict=False)
    return {
        "graph": graph,
        "world_size": head.get("world_size"),
        "batch_norm": head.get("batch_norm", "local"),
        "rounds": head.get("rounds", "BK"),
        "row_shares": head.get("row_shares"),
        "layers": {
            name: LayerPlan(choice.scheme, choice.group_size, choice.shares, choice.recompute)
            for name, choice in layers.items()
        },
    }


def _flat(entries: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Undoes the nesting that TOML sees in an unquoted `classifier.0 = {...}`."""
    flat: dict[str, Any] = {}
    for key, value in entries.items():
        if isinstance(value, dict) and value and all(isinstance(v, dict) for v in value.values()):
            flat.update(_flat(value, f"{prefix}{key}."))
        else:
            flat[prefix + key] = value
    return flat


def _choice_entry(choice: LayerPlan) -> dict[str, Any]:
    entry, own = _without_defaults(choice, LayerPlan()), choice.scheme
    if not isinstance(own, Own):
        return entry
    text = own.name if own.is_imported else {"name": own.name, "file": own.file}
    # A table of nothing but tables would be read as one of layers, so the size is always there.
    return {**entry, "scheme": text, "group_size": choice.group_size}


@checked(config=ConfigDict(extra="forbid", strict=True))
class _Choice:
    scheme: str | dict[str, str] = "replicate"
    group_size: int = 1
    shares: tuple[float, ...] | None = None
    recompute: bool = False


_CHOICE = TypeAdapter(_Choice)


def _without_defaults(value: Any, default: Any) -> dict[str, Any]:
    pairs = ((f.name, getattr(value, f.name)) for f in fields(value))
    # What is None follows from the rest: FLOPs that are not known.
    return {n: item for n, item in pairs if item is not None and item != getattr(default, n)}


_BLANK_LAYER = Layer("", "", (), (), ())
_BLANK_WEIGHT = Weight("", ())


def _graph_entries(graph: Graph) -> dict[str, Any]:
    layers = []
    for layer in graph.layers:
        entry = _without_defaults(layer, _BLANK_LAYER)
        if layer.weights:
            entry["weights"] = [_without_defaults(w, _BLANK_WEIGHT) for w in layer.weights]
        layers.append(entry)
    source = graph.source
    evaluation = {} if graph.evaluation is None else _graph_entries(graph.evaluation)
    return {
        "fingerprint": graph.fingerprint,
        "source": {"kind": source.kind, "name": source.name, "arguments": dict(source.arguments)},
        "input_shape": graph.input_shape,
        "num_classes": graph.num_classes,
        "outputs": graph.outputs,
        "roles": graph.roles,
        "layers": layers,
        **({} if graph.vocabulary is None else {"vocabulary": graph.vocabulary}),
        **({} if graph.least_batch == 1 else {"least_batch": graph.least_batch}),
        **({"evaluation": evaluation} if evaluation else {}),
    }


def _read_graph(entry: Any) -> Graph | None:
    if entry is None:
        return None
    try:
        source = entry["source"]
        arguments = _with_tuples(source["arguments"])
        graph = Graph(
            source=Source(source["kind"], source["name"], tuple(sorted(arguments.items()))),
            input_shape=tuple(entry["input_shape"]),
            num_classes=entry["num_classes"],
            layers=tuple(_read_layer(layer) for layer in entry["layers"]),
            outputs=tuple(entry["outputs"]),
            roles=tuple(entry["roles"]),
            evaluation=_read_graph(entry.get("evaluation")),
            vocabulary=entry.get("vocabulary"),
            least_batch=entry.get("least_batch", 1),
        )
        fingerprint = entry["fingerprint"]
    except (KeyError, TypeError, AttributeError) as error:
        raise PlanError(f"[graph] is damaged ({error!r}): save the plan again") from None
    if graph.fingerprint != fingerprint:
        raise PlanError("[graph] was changed by hand: trace the model and make the plan again")
    return graph


def _with_tuples(entry: Mapping[str, Any]) -> dict[str, Any]:
    """An entry with tuples for its lists, since TOML has only lists."""
    return {key: tuple(v) if isinstance(v, list) else v for key, v in entry.items()}


def _read_layer(entry: Mapping[str, Any]) -> Layer:
    values = _with_tuples(entry)
    weights = tuple(
        Weight(**{"shape": (), **_with_tuples(weight)}) for weight in entry.get("weights", ())
    )
    blank = {f.name: getattr(_BLANK_LAYER, f.name) for f in fields(Layer)}
    return Layer(**{**blank, **values, "weights": weights})
