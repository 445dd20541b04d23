"""What each layer may choose from, and what its choice means for the layers before it.

Of a layer's choice the layers before it depend only on its preference, the layout that it would
like to read: own rows, all rows of a group, or those cut by features.
"""

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

from workbench.plan.choice import LayerPlan, check
from workbench.plan.errors import PlanError
from workbench.plan.graph import Graph, Layer, unknown
from workbench.plan.mesh import group_sizes
from workbench.plan.rules import SCHEMES, SPLITTABLE, schemes_of

Pin = str | LayerPlan
Shares = Sequence[float]
# What a choice would like to read: ("rows", 1, None), ("whole", k, None) or ("cut", k, shares).
Preference = tuple[str, int, tuple[float, ...] | None]

_CUT = ("shard_out", "shard_in", "shard_heads")


def options_of(
    graph: Graph,
    world_size: int,
    sizes: Sequence[int],
    shares: Mapping[int, Sequence[Shares]],
    pins: Mapping[str, Pin],
) -> dict[str, tuple[LayerPlan, ...]]:
    """For each layer that can be split, every choice that is to be considered.

    Args:
        graph: the model.
        world_size: number of ranks.
        sizes: the group sizes to consider.
        shares: for a group size, relative sizes of unequal pieces to consider beside equal ones.
        pins: what the user has decided, by the layer's name.

    Raises:
        PlanError: a pin that the layer cannot have.
    """
    found = {}
    for layer in graph.layers:
        if layer.kind not in SPLITTABLE:
            continue
        together = layer.name in graph.shares_weights
        every = (LayerPlan(),) if together else tuple(_choices(layer, sizes, shares))
        pin = pins.get(layer.name)
        if isinstance(pin, LayerPlan):
            check(layer, pin, world_size, shares_weights=together)
            every = (pin,)
        elif pin is not None:
            if pin not in schemes_of(layer):
                raise PlanError(
                    f"pin of layer {layer.name!r}: {unknown('scheme', pin, schemes_of(layer))}"
                )
            every = tuple(choice for choice in every if choice.scheme == pin)
            if not every:
                raise PlanError(
                    f"pin of layer {layer.name!r}: {pin!r} is impossible in groups of "
                    f"{', '.join(map(str, sizes))} ranks"
                    + (", and with weights that it shares" if together else "")
                )
        found[layer.name] = every
    return found


def _choices(
    layer: Layer, sizes: Sequence[int], shares: Mapping[int, Sequence[Shares]]
) -> list[LayerPlan]:
    found = [LayerPlan()]
    for k in sizes:
        for scheme in schemes_of(layer):
            if k == 1 or scheme == "replicate":
                continue
            found.append(LayerPlan(scheme, k))
            if scheme in _CUT:
                found += [LayerPlan(scheme, k, tuple(cut)) for cut in shares.get(k, ())]
    return found


def pinned(graph: Graph, pin: Mapping[str, Pin]) -> dict[str, Pin]:
    """The pins of single layers, from names and patterns such as "features.*".

    A pattern means those of the layers that fit which can be split.

    Raises:
        PlanError: a name or pattern that fits no layer, or a value that is no choice.
    """
    able = [layer.name for layer in graph.layers if layer.kind in SPLITTABLE]
    found: dict[str, Pin] = {}
    for pattern, choice in pin.items():
        if not isinstance(choice, str | LayerPlan):
            raise PlanError(
                f"pin of {pattern!r} must be a scheme ({', '.join(SCHEMES)}) or a LayerPlan, "
                f"got {choice!r}"
            )
        fitting = [name for name in able if name == pattern or fnmatchcase(name, pattern)]
        if not fitting:
            raise PlanError(f"pin: {unknown('layer', pattern, able, of=graph.source.name)}")
        found.update(dict.fromkeys(fitting, choice))
    return found


def checked_sizes(world_size: int, sizes: Sequence[int] | None) -> tuple[int, ...]:
    """The group sizes to consider, ascending; None: all that divide the world.

    Raises:
        PlanError: one that does not.
    """
    valid = group_sizes(world_size)
    for k in sizes or ():
        if k not in valid:
            raise PlanError(
                f"group_sizes: {k!r} does not divide world_size {world_size}; "
                f"valid are {', '.join(map(str, valid))}"
            )
    return valid if sizes is None else tuple(sorted({1, *sizes}))


def preference_of(layer: Layer, choice: LayerPlan) -> Preference:
    """Which layout a choice would like to read."""
    if choice.group_size == 1:
        return "rows", 1, None
    grouped = choice.scheme == "shard_out" and layer.groups > 1
    if choice.scheme == "shard_in" or grouped:
        return "cut", choice.group_size, choice.shares
    return "whole", choice.group_size, None


def preferences(graph: Graph, options: Mapping[str, Sequence[LayerPlan]]) -> tuple[Preference, ...]:
    """The preferences of all options; own rows, which the outputs prefer, come first."""
    own: Preference = ("rows", 1, None)
    every = (
        preference_of(graph[name], choice) for name, those in options.items() for choice in those
    )
    return tuple(dict.fromkeys((own, *every)))


def choice_preferring(layer: Layer, preference: Preference) -> LayerPlan:
    """A choice with this preference."""
    form, k, shares = preference
    if form == "rows":
        return LayerPlan()
    if form == "whole":
        return LayerPlan("duplicate", k)
    return LayerPlan("shard_out" if layer.groups > 1 else "shard_in", k, shares)
