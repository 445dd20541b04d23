"""Plans and graphs as TOML, and back, with an error for every wrong entry."""

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Annotated, Any, Literal, Protocol, TypeVar, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, create_model
from pydantic.dataclasses import dataclass as checked

from workbench.plan.extension.user_object import Own, foreign
from workbench.plan.graph.graph import KINDS, Graph, Input, Layer, Source, Weight, plain_input
from workbench.plan.graph.saved import Propagation, Saved
from workbench.plan.io.errors import PlanError, readable, unknown
from workbench.plan.io.value import dump
from workbench.plan.placement.layer_plan import LayerPlan

T = TypeVar("T")

MOST_RANKS = 1 << 16
"""Ranks of a plan that is read: of more, to show it would take this process's memory."""

_PLAN_KEYS = ("world_size", "batch_norm", "rounds", "row_shares", "shard_tokens", "model")


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

    @property
    def shard_tokens(self) -> bool | tuple[float, ...]: ...


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
    if plan.shard_tokens:
        head["shard_tokens"] = plan.shard_tokens
    choices = {name: _choice_entry(choice) for name, choice in plan.layers.items()}
    return (
        dump({"plan": head, "layers": choices})
        + "\n# The model, as traced. Written by the workbench; to be left as it is.\n"
        + dump({"graph": _graph_entries(plan.graph)})
    )


def read(content: Mapping[str, Any], graph: Graph | None, *, trust: bool) -> dict[str, Any]:
    """The fields of a Plan from parsed TOML."""
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
            choice = _CHOICE.validate_python(entry, strict=False)
        scheme = choice.scheme if trust else foreign(choice.scheme, f"layers.{name}.scheme")
        layers[name] = LayerPlan(scheme, choice.group_size, choice.shares, choice.recompute)
    world_size = head.get("world_size")
    if isinstance(world_size, int) and world_size > MOST_RANKS:
        raise PlanError(f"[plan]: world_size: at most {MOST_RANKS:,} in a text, got {world_size}")
    return {
        "graph": graph,
        "world_size": world_size,
        "batch_norm": head.get("batch_norm", "local"),
        "rounds": head.get("rounds", "BK"),
        "row_shares": head.get("row_shares"),
        "shard_tokens": head.get("shard_tokens", False),
        "layers": layers,
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


_BLANK_INPUT = Input(())
_BLANK_LAYER = Layer("", "", (), (), ())
_BLANK_WEIGHT = Weight("", ())
_BLANK_PROPAGATION = Propagation((), (), 0)
_BLANK_SAVED = Saved()


def _graph_entries(graph: Graph) -> dict[str, Any]:
    layers = []
    for layer in graph.layers:
        entry = _without_defaults(layer, _BLANK_LAYER)
        if layer.weights:
            entry["weights"] = [_without_defaults(w, _BLANK_WEIGHT) for w in layer.weights]
        if layer.propagations:
            entry["propagations"] = [
                _without_defaults(p, _BLANK_PROPAGATION) for p in layer.propagations
            ]
        if layer.saved is not None:
            entry["saved"] = _without_defaults(layer.saved, _BLANK_SAVED)
        layers.append(entry)
    source = graph.source
    evaluation = {} if graph.evaluation is None else _graph_entries(graph.evaluation)
    return {
        "fingerprint": graph.fingerprint,
        "source": {"kind": source.kind, "name": source.name, "arguments": dict(source.arguments)},
        **_inputs_entries(graph.inputs),
        "num_classes": graph.num_classes,
        "outputs": graph.outputs,
        "roles": graph.roles,
        "layers": layers,
        **({} if graph.least_batch == 1 else {"least_batch": graph.least_batch}),
        **({"keys": graph.keys} if graph.keys else {}),
        **({"evaluation": evaluation} if evaluation else {}),
    }


def _inputs_entries(inputs: tuple[Input, ...]) -> dict[str, Any]:
    """The short form, where that says all."""
    plain = plain_input(inputs)
    if plain is None:
        entries = [{"shape": i.shape, **_without_defaults(i, _BLANK_INPUT)} for i in inputs]
        return {"inputs": entries}
    tokens = {} if plain.vocabulary is None else {"vocabulary": plain.vocabulary}
    return {"input_shape": plain.shape, **tokens}


def _read_inputs(read: "_GraphEntry") -> tuple[Input, ...]:
    if read.inputs:
        entries = read.inputs
    elif read.input_shape is not None:
        entries = ({"shape": read.input_shape, "vocabulary": read.vocabulary},)
    else:
        raise PlanError("[graph]: input_shape: missing, and no inputs are there")
    try:
        inputs = tuple(_made(Input, _InputEntry, entry) for entry in entries)
    except ValueError as error:
        raise PlanError(f"[graph]: {error}") from None
    names = {one.name for one in inputs}
    if len(inputs) > 1 and ("" in names or len(names) < len(inputs)):
        raise PlanError(f"[graph]: of several inputs each has its own name, got {sorted(names)}")
    return inputs


def _read_graph(entry: Any) -> Graph | None:
    """The model that a text describes, each of its values of the type that its class says."""
    if entry is None:
        return None
    with readable(PlanError, "[graph]"):
        read = _GraphEntry.model_validate(_with_tuples(entry))
    source = read.source
    graph = Graph(
        source=Source(source.kind, source.name, tuple(sorted(source.arguments.items()))),
        inputs=_read_inputs(read),
        num_classes=read.num_classes,
        layers=tuple(map(_layer, read.layers)),
        outputs=read.outputs,
        roles=read.roles,
        evaluation=_read_graph(read.evaluation),
        least_batch=read.least_batch,
        keys=read.keys,
    )
    _require_connected(graph)
    if graph.fingerprint != read.fingerprint:
        raise PlanError("[graph] was changed by hand: trace the model and make the plan again")
    return graph


def _require_connected(graph: Graph) -> None:
    """Checks that layers read what comes before them, and that all that is named is there."""
    before = set(graph.sources)
    for layer in graph.layers:
        for name in layer.inputs:
            if name not in before:
                raise PlanError(f"[graph]: layer {layer.name!r}: no layer {name!r} before it")
        if layer.name in before:
            raise PlanError(f"[graph]: two layers are called {layer.name!r}")
        before.add(layer.name)
    for layer in graph.layers:
        if layer.shared and layer.shared not in before:
            said = unknown("layer", layer.shared, before)
            raise PlanError(f"[graph]: layer {layer.name!r}: shared: {said}")
    for name in graph.outputs:
        if name not in before:
            raise PlanError(f"[graph]: outputs: {unknown('layer', name, before)}")
    count, keys = len(graph.outputs), set(graph.keys)
    named = len(keys) == count and all(isinstance(key, str) for key in keys)
    if keys and (len(graph.keys) != count or not (named or keys == set(range(count)))):
        raise PlanError(f"[graph]: keys: {count} places or names, got {graph.keys}")


def _layer(entry: Mapping[str, Any]) -> Layer:
    layer = _made(Layer, _LayerEntry, entry)
    weights = tuple(_made(Weight, _WeightEntry, each) for each in entry.get("weights", ()))
    ways = entry.get("propagations", ())
    cut = tuple(_made(Propagation, _PropagationEntry, each) for each in ways)
    kept = None if (known := entry.get("saved")) is None else _made(Saved, _SavedEntry, known)
    return replace(layer, weights=weights, propagations=cut, saved=kept)


def _made(kind: type[T], entry: type[BaseModel], given: Mapping[str, Any]) -> T:
    """The value of an entry, whose fields are those of its class."""
    with readable(PlanError, f"[graph]: {kind.__name__.lower()} {given.get('name')!r}"):
        return kind(**dict(entry.model_validate(given)))


def _with_tuples(value: Any) -> Any:
    """A value with tuples for its lists, since TOML has only lists."""
    if isinstance(value, dict):
        return {key: _with_tuples(entry) for key, entry in value.items()}
    return tuple(map(_with_tuples, value)) if isinstance(value, list) else value


def _entry_of(blank: object, **others: Any) -> type[BaseModel]:
    """A class of entries with the fields of a value's class, which takes no other types.

    Args:
        blank: the value of that class that has what is left out of an entry.
        others: (type, default) of fields that have others.
    """
    own: dict[str, Any] = {}
    for name, default in vars(blank).items():
        told = get_type_hints(type(blank))[name]
        own[name] = (_IN_RANGE.get(told, told), default)
    return create_model(type(blank).__name__, __config__=_STRICT, **own | others)


_STRICT = ConfigDict(extra="forbid", strict=True)
_Number = Annotated[int, Field(ge=-1, le=2**63 - 1)]  # -1: a draw that has no batch
_Shape = tuple[Annotated[int, Field(ge=0, le=2**63 - 1)], ...]
_Kind = Annotated[str, Field(pattern=f"^({'|'.join(KINDS)})$")]
_Entries = tuple[dict[str, Any], ...]
_IN_RANGE = {int: _Number, int | None: _Number | None, tuple[int, ...]: tuple[_Number, ...]}
_InputEntry = _entry_of(_BLANK_INPUT, shape=(_Shape, ...))
_WeightEntry = _entry_of(_BLANK_WEIGHT, shape=(_Shape, ()))
_LayerEntry = _entry_of(
    _BLANK_LAYER,
    kind=(_Kind, ...),
    input_shape=(_Shape, ()),
    output_shape=(_Shape, ()),
    weights=(_Entries, ()),
    propagations=(_Entries, ()),
    saved=(dict[str, Any] | None, None),
)
_PropagationEntry = _entry_of(
    _BLANK_PROPAGATION,
    inputs=(tuple[_Shape, ...], ()),
    output=(_Shape, ...),
    pieces=(_Number, ...),
)
_SavedEntry = _entry_of(_BLANK_SAVED)


class _SourceEntry(BaseModel):
    model_config = _STRICT

    kind: Literal["torchvision", "module"]
    name: str
    arguments: dict[str, Any]


class _GraphEntry(BaseModel):
    model_config = _STRICT

    fingerprint: str
    source: _SourceEntry
    input_shape: _Shape | None = None
    inputs: _Entries = ()
    num_classes: _Number
    outputs: Annotated[tuple[str, ...], Field(min_length=1)]
    roles: tuple[Literal["prediction", "auxiliary", "unused"], ...]
    layers: _Entries
    vocabulary: _Number | None = None
    least_batch: _Number = 1
    keys: tuple[_Number | str, ...] = ()
    evaluation: dict[str, Any] | None = None
