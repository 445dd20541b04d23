"""The choices of each layer, and what they mean for the layers before it.

Layers depend on a later layer's choice only by its preference, the layout that it prefers to read:
own rows, all rows of a group, or features that are sharded.

A layer's layouts follow from the layouts of its inputs and from the preference of one later layer,
its decider: the one reached by going on to the first reader until a layer has a scheme. So every
layer can be placed by itself, and a search can go through the graph layer by layer.
"""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import suppress
from fnmatch import fnmatchcase

from workbench.plan.extension.user_object import Own
from workbench.plan.graph.graph import Graph, Layer
from workbench.plan.io.errors import PlanError, unknown
from workbench.plan.placement.flow import Placing
from workbench.plan.placement.layer_plan import LayerPlan, as_scheme, check, placed_by_scheme
from workbench.plan.placement.placement import ROWS, Layout, Replicate, group_sizes
from workbench.plan.placement.rules import SPLITTABLE, after, joins, read_without_scheme
from workbench.plan.placement.schemes import BUILT_IN, SCHEMES, schemes_of
from workbench.plan.placement.tied import kept_whole, tied_tables, together

# A preferred layout: ("rows", 1, None), ("whole", k, None) or ("cut", k, shares); or a person's own
# scheme in the place of "cut", whose layers read features that are cut as it says.
Preference = tuple[Hashable, int, tuple[float, ...] | None]

# Layers that follow their input, and of which no later layer decides how: besides those that can be
# split, they can be given a scheme of a person's own in a search.
_FOLLOWING = ("op", "layer_norm")
# Of a model with several tables that layers share, those beyond so many ways are whole.
_MOST_WAYS = 64


class LocalPlacement:
    """The placement rules, applied layer by layer."""

    def __init__(self, graph: Graph, options: Mapping[str, Sequence[LayerPlan]]) -> None:
        self.graph = graph
        self.preferences = preferences(graph, options)
        self.deciders = _deciders(graph, options)
        able = [graph[name] for name in options]
        # Where all layers prefer the same, each one is placed as if only its decider did.
        self._uniform = {
            preference: Placing(
                graph,
                {
                    layer.name: choice_preferring(layer, preference, options[layer.name])
                    for layer in able
                },
            )
            for preference in self.preferences
        }
        kinds: dict[Hashable, int] = {}
        self._kinds = {
            layer.name: kinds.setdefault((_shape(layer), self.alike(layer.name)), len(kinds))
            for layer in graph.layers
        }
        self._known: dict[Hashable, dict[tuple[Layout, Layout], frozenset[Preference]]] = {}

    def followed(
        self, layer: Layer, coming: tuple[Layout, ...]
    ) -> dict[tuple[Layout, Layout], frozenset[Preference]]:
        """The (read, given) layouts of a layer without a scheme, with its decider's preferences.

        Args:
            coming: the layouts of its inputs, before any conversion.
        """
        key = (self._kinds[layer.name], coming)
        if key not in self._known:
            self._known[key] = self._followed(layer, coming)
        return self._known[key]

    def alike(self, name: str) -> Hashable:
        """A key that is equal for layers of one shape that are placed alike."""
        heard = tuple(
            (placing.preferred[name], placing.gathered.get(name))
            for placing in self._uniform.values()
        )
        shapes = (self.graph.shape_of(read) for read in self.graph[name].inputs)
        hears = name in self.deciders
        ways = self.graph[name].propagations
        return heard, tuple(shapes), name in self.graph.shares_weights, hears, ways

    def _followed(
        self, layer: Layer, coming: tuple[Layout, ...]
    ) -> dict[tuple[Layout, Layout], frozenset[Preference]]:
        found: dict[tuple[Layout, Layout], frozenset[Preference]] = {}
        for preference in self.preferences if layer.name in self.deciders else self.preferences[:1]:
            heard = self._uniform[preference]
            gathered = heard.gathered.get(layer.name)
            read = read_without_scheme(
                self.graph, layer, coming, heard.preferred[layer.name], gathered
            )
            place = (read, after(layer, read))
            found[place] = found.get(place, frozenset()) | {preference}
        return found


Pin = str | LayerPlan

Shares = Sequence[float]


def options_of(
    graph: Graph,
    world_size: int,
    sizes: Sequence[int],
    shares: Mapping[int, Sequence[Shares]],
    pins: Mapping[str, Pin],
    own: Sequence[Own] = (),
) -> dict[str, tuple[LayerPlan, ...]]:
    """The choices to consider, for each layer that can be split.

    Own schemes are considered for the layers that can be split without them, and for operations
    that follow their input whatever comes later. ReLU, pools and the like, which pass on what later
    layers prefer, follow their input in a search.

    Args:
        world_size: the number of ranks.
        shares: the relative sizes of unequal pieces to consider beside equal ones, for each group
            size.

    Raises:
        PlanError: a pin that the layer cannot have, or an own scheme that states what cannot be.
    """
    found = {}
    tables = {layer.name for users in tied_tables(graph) for layer in users}
    whole = kept_whole(graph) | (graph.shares_weights - tables)
    for layer in graph.layers:
        pin = pins.get(layer.name)
        if layer.kind not in (*SPLITTABLE, *_FOLLOWING) or joins(layer):
            continue
        kept = layer.name in whole
        more = [] if kept or layer.name in tables else _own_choices(layer, sizes, shares, own)
        if layer.kind not in SPLITTABLE and not more and pin is None:
            continue
        every = (LayerPlan(),) if kept else (*_choices(layer, sizes, shares), *more)
        if isinstance(pin, LayerPlan):
            check(layer, pin, world_size)
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
                    + (
                        ", and with weights that it shares, or that evaluation reads otherwise"
                        if kept
                        else ""
                    )
                )
        found[layer.name] = every
    return found


def ways_to_share(
    graph: Graph, world_size: int, options: Mapping[str, Sequence[LayerPlan]]
) -> tuple[dict[str, LayerPlan], ...]:
    """The choices that layers with one table can have together: they hold it alike.

    Args:
        world_size: the number of ranks.

    Returns:
        For each way a choice of each such layer; of a model without them, one way without choices.

    Raises:
        PlanError: these layers' choices do not go together.
    """
    ways: list[dict[str, LayerPlan]] = [{}]
    for table, *others in tied_tables(graph):
        able = [
            {name: choice for name, choice in held.items() if choice in options[name]}
            for choice in options[table.name]
            for held in _held_alike(graph, table.name, choice, world_size)
        ]
        able = [one for one in able if len(one) == 1 + len(others)]
        if not able:
            raise PlanError(
                f"pin: {table.name!r} and {others[0].name!r} have the same weights, and no choices "
                "that are left to them hold these alike; pin one of them"
            )
        if len(ways) * len(able) > _MOST_WAYS:
            able = able[:1]
        ways = [way | one for way in ways for one in able]
    return tuple(ways)


def _held_alike(
    graph: Graph, name: str, choice: LayerPlan, world_size: int
) -> Iterator[dict[str, LayerPlan]]:
    with suppress(PlanError):
        yield together(graph, name, choice, {}, world_size)


def _choices(
    layer: Layer, sizes: Sequence[int], shares: Mapping[int, Sequence[Shares]]
) -> list[LayerPlan]:
    found = [LayerPlan()]
    for k in sizes:
        for scheme in schemes_of(layer):
            if k == 1 or scheme == "replicate":
                continue
            found.append(LayerPlan(scheme, k))
            if BUILT_IN[scheme].units(layer):
                found += [LayerPlan(scheme, k, tuple(cut)) for cut in shares.get(k, ())]
    return found


def _own_choices(
    layer: Layer,
    sizes: Sequence[int],
    shares: Mapping[int, Sequence[Shares]],
    own: Sequence[Own],
) -> list[LayerPlan]:
    """The choices of own schemes that take a layer and can divide it over so many ranks."""
    found = []
    for scheme in own:
        for k in sizes:
            choice = LayerPlan(scheme, k)
            if k == 1 or not choice.meant.takes(layer):
                continue
            units = choice.meant.units(layer)
            for cut in (None, *(map(tuple, shares.get(k, ())) if units else ())):
                one = LayerPlan(scheme, k, cut)
                with suppress(PlanError):  # too few units for so many ranks
                    placed_by_scheme(layer, one, ROWS)
                    found.append(one)
    return found


def own_schemes(given: Sequence[object]) -> tuple[Own, ...]:
    """The own schemes to consider in a search.

    Raises:
        PlanError: one of them is no scheme of a person's own.
    """
    found = [as_scheme(one) for one in given]
    for one in found:
        if not isinstance(one, Own):
            raise PlanError(
                f"schemes: {one!r} is no own scheme; the built-in ones ({', '.join(SCHEMES)}) are "
                f"always considered"
            )
    return tuple(one for one in found if isinstance(one, Own))


def pinned(graph: Graph, pin: Mapping[str, Pin]) -> dict[str, Pin]:
    """The pins of single layers, from names and patterns such as "features.*".

    A pattern means the matching layers that can be split.

    Raises:
        PlanError: a name or pattern that matches no layer, or a value that is no choice.
    """
    able = [layer.name for layer in graph.layers if layer.kind in SPLITTABLE]
    also = [layer.name for layer in graph.layers if layer.kind in _FOLLOWING]
    found: dict[str, Pin] = {}
    for pattern, choice in pin.items():
        if not isinstance(choice, str | LayerPlan):
            raise PlanError(
                f"pin of {pattern!r} must be a scheme ({', '.join(SCHEMES)}) or a LayerPlan, "
                f"got {choice!r}"
            )
        names = able + also if isinstance(choice, LayerPlan) and choice.is_own else able
        fitting = [name for name in names if name == pattern or fnmatchcase(name, pattern)]
        if not fitting:
            raise PlanError(f"pin: {unknown('layer', pattern, able, of=graph.source.name)}")
        found.update(dict.fromkeys(fitting, choice))
    return found


def checked_sizes(world_size: int, sizes: Sequence[int] | None) -> tuple[int, ...]:
    """The group sizes to consider, ascending; None: all that divide the world.

    Raises:
        PlanError: a size that does not divide the world.
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
    """The layout that a choice prefers to read."""
    if choice.group_size == 1:
        return "rows", 1, None
    read, _ = placed_by_scheme(layer, choice, ROWS)
    if read.placement == Replicate():
        return "whole", choice.group_size, None
    return choice.scheme if choice.is_own else "cut", choice.group_size, choice.shares


def preferences(graph: Graph, options: Mapping[str, Sequence[LayerPlan]]) -> tuple[Preference, ...]:
    """The preferences of all options; own rows, which the outputs prefer, come first."""
    own: Preference = ("rows", 1, None)
    every = (
        preference_of(graph[name], choice) for name, those in options.items() for choice in those
    )
    return tuple(dict.fromkeys((own, *every)))


def choice_preferring(
    layer: Layer, preference: Preference, options: Sequence[LayerPlan]
) -> LayerPlan:
    """A choice with this preference; of what is not among the options, none.

    No embedding reads features, and not every layer has the choice of an own scheme.
    """
    form, k, shares = preference
    if form == "rows":
        return LayerPlan()
    if form == "whole":
        return LayerPlan("duplicate", k)
    if isinstance(form, Own) or layer.kind not in SPLITTABLE or layer.kind == "embedding":
        wanted = (one for one in options if (one.scheme, one.group_size, one.shares) == preference)
        return next(wanted, LayerPlan())
    return LayerPlan("shard_out" if layer.groups > 1 else "shard_in", k, shares)


def _shape(layer: Layer) -> Hashable:
    """The properties of a layer itself that the placement rules depend on."""
    shapes = layer.input_shape, layer.output_shape, layer.rows
    return layer.kind, layer.of_type, shapes, bool(layer.inputs), joins(layer)


def _deciders(graph: Graph, options: Mapping[str, Sequence[LayerPlan]]) -> dict[str, str]:
    """For each layer without options, its decider; the last layers have none."""
    found: dict[str, str] = {}
    for layer in reversed(graph.layers):
        readers = graph.consumers[layer.name]
        if layer.name in options or not readers:
            continue
        first = readers[0]
        if first in options:
            found[layer.name] = first
        elif first in found:
            found[layer.name] = found[first]
    return found
