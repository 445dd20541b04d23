"""Layers that share weights, and so hold them alike: modules called twice, and tied weights.

A table that embeds tokens and, as a matrix, gives their logits, is cut by the vocabulary or by
features:

    cut by          embedding      unembedding    table of V tokens, E features
    vocabulary      shard_in       shard_out      S(0) of [V, E]
    features        shard_out      shard_in       S(1)

A model may read a weight otherwise in evaluation than in training: merged with another, rounded, or
in a layer of another name. Nobody moves weights between the two, so such a weight stays whole.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace

from workbench.plan.graph.graph import Graph, Layer, Weight
from workbench.plan.io.errors import PlanError
from workbench.plan.placement.flow import Flow
from workbench.plan.placement.layer_plan import LayerPlan, check
from workbench.plan.placement.placement import Replicate, Shard
from workbench.plan.placement.rules import SPLITTABLE
from workbench.plan.placement.schemes import schemes_of

Held = dict[str, tuple[int, Replicate | Shard]]
"""For each shared weight, by its owner's name for it: the group's size, and its placement there."""


def sharing(graph: Graph, name: str) -> tuple[Layer, ...]:
    """The layers that share weights with this one, itself included: the owner of them first."""
    owner = graph[graph[name].shared or name]
    return owner, *(layer for layer in graph.layers if layer.shared == owner.name)


def tied_tables(graph: Graph) -> list[tuple[Layer, ...]]:
    """The users of each table that embeds and does something else, too, and that may be cut."""
    whole = kept_whole(graph) if graph.shares_weights else frozenset()
    found = []
    for layer in graph.layers:
        if layer.kind == "embedding" and layer.name in graph.shares_weights and not layer.shared:
            users = sharing(graph, layer.name)
            if all(one.kind in SPLITTABLE and one.name not in whole for one in users):
                found.append(users)
    return found


def together(
    graph: Graph,
    name: str,
    choice: LayerPlan,
    choices: Mapping[str, LayerPlan],
    world_size: int,
) -> dict[str, LayerPlan]:
    """A layer's new choice, and those of the layers that share its weights: they are held alike.

    Args:
        choices: the choices so far, whose recomputation stays.
    """
    found = {name: choice}
    if name not in graph.shares_weights:
        return found
    check(graph[name], choice, world_size)
    owner, layer = sharing(graph, name)[0], graph[name]
    for other in sharing(graph, name):
        if other is layer:
            continue
        now = choices.get(other.name, LayerPlan())
        able = [LayerPlan(recompute=now.recompute)]
        if choice.group_size > 1:
            first = sorted(schemes_of(other), key=lambda scheme: scheme != choice.scheme)
            able = [replace(choice, scheme=s, recompute=now.recompute) for s in first]
        fitting = [one for one in able if _alike(owner, layer, choice, other, one)]
        if not fitting:
            raise _refusal(owner, layer, choice, other, now)
        found[other.name] = fitting[0]
    return found


def check_tied(graph: Graph, choices: Mapping[str, LayerPlan]) -> None:
    """Checks that layers which share weights hold them alike."""
    for layer in graph.layers if graph.shares_weights else ():
        if not layer.shared:
            continue
        owner = graph[layer.shared]
        one, other = (choices.get(each.name, LayerPlan()) for each in (owner, layer))
        if not _alike(owner, owner, one, layer, other):
            raise _refusal(owner, owner, one, layer, other)


def read_otherwise(graph: Graph) -> dict[str, str]:
    """The layers whose weights other layers read in evaluation, each with one of those."""
    there = graph.evaluation
    if there is None:
        return {}
    named = {
        name: layer.name
        for layer in there.layers
        for weight in layer.weights
        for name in (weight.name, *weight.aliases)
    }
    found: dict[str, str] = {}
    for layer in graph.layers:
        if layer.kind == "parameter" or not layer.weights:
            continue  # which is whole in any case
        users = {one.name: one.kind for one in sharing(graph, layer.name)}
        names = (name for weight in layer.weights for name in (weight.name, *weight.aliases))
        for owner in dict.fromkeys(named[name] for name in names if name in named):
            for one in sharing(there, owner):
                of_parameter = one.kind == "parameter"
                readers = there.consumers[one.name] if of_parameter else (one.name,)
                if readers and users.get(one.name) != one.kind:
                    found = {**dict.fromkeys(users, readers[0]), **found}
    return found


def kept_whole(graph: Graph) -> frozenset[str]:
    """The layers that no rule cuts: evaluation reads otherwise their weights, or those that follow.

    A batch norm, say, is cut as the layer before it is.
    """
    found: set[str] = set()
    waiting = list(read_otherwise(graph))
    while waiting:
        name = waiting.pop()
        if name in found or name in graph.sources:
            continue
        found.add(name)
        if graph[name].kind not in SPLITTABLE:
            waiting += graph[name].inputs
    return frozenset(found)


def check_evaluated(graph: Graph, flow: Callable[[], Flow]) -> None:
    """Checks that what evaluation reads otherwise than training is whole."""
    for name, reader in read_otherwise(graph).items():
        for weight in graph[graph[name].shared or name].weights:
            placed = flow().weights[weight.name]
            if isinstance(placed.placement, Shard):
                raise PlanError(
                    f"layer {name!r}: {weight.name!r} is cut, {placed.placement} over "
                    f"{placed.group_size}, and evaluation reads it otherwise than training, whole, "
                    f"in {reader!r}: keep the layer, or the one that it follows, whole "
                    "(scheme='replicate'), or let forward read the weight alike in both"
                )


def _alike(owner: Layer, layer: Layer, choice: LayerPlan, other: Layer, others: LayerPlan) -> bool:
    """Whether two layers hold the weights that both have of an owner in the same placement."""
    if choice.group_size == others.group_size == 1:
        return True
    if choice.is_own or others.is_own:
        return False
    one, another = held(owner, layer, choice), held(owner, other, others)
    return all(another[name] == one[name] for name in one.keys() & another.keys())


def held(owner: Layer, layer: Layer, choice: LayerPlan) -> Held:
    """How a layer holds the weights that it has of their owner, under a choice."""
    k = choice.group_size
    path = layer.name.partition("@")[0]  # a further call of a module has its number behind it
    placed: Held = {}
    for weight in owner.weights:
        for name in (weight.name, *weight.aliases):
            if name == path or name.startswith(f"{path}."):
                seen = replace(weight, name=name)
                whole = k == 1 or not weight.shape
                placement = Replicate() if whole else _held(replace(layer, name=path), seen, choice)
                placed[weight.name] = k, placement
    return placed


def _held(layer: Layer, weight: Weight, choice: LayerPlan) -> Replicate | Shard:
    division = choice.division(layer)
    read, _ = choice.meant.layouts(layer, division, None)
    return choice.meant.holds(layer, weight, division, read)


def _refusal(
    owner: Layer, layer: Layer, choice: LayerPlan, other: Layer, others: LayerPlan
) -> PlanError:
    def said(one: Layer, of: LayerPlan) -> str:
        if of.is_own or (of.group_size > 1 and of.scheme not in schemes_of(one)):
            return f"{one.name!r} cannot be {of.name!r} with weights that others have, too"
        ways = (f"{n} {p} over {k}" for n, (k, p) in held(owner, one, of).items())
        return f"{one.name!r} ({of.name}) holds {', '.join(ways)}"

    return PlanError(
        f"layer {layer.name!r} shares its weights with {other.name!r}, and both must hold them "
        f"alike: {said(layer, choice)}, and {said(other, others)}; with_layer({layer.name!r}, ...) "
        "changes both where that is possible, and 'replicate' always is"
    )
