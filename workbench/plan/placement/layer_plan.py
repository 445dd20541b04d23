"""One layer's choice in a plan.

The segments of layers that are recomputed in the backward pass.

A layer saves what its backward pass needs, from forward until then. Layers that are recomputed save
nothing: successive ones in the order of execution form one segment, of which only the inputs are
saved. When the gradient of its outputs is there, the segment's forward pass runs once more, and
then its backward pass.

    memory    a segment's activations live from the start of its own backward pass to its end. At
              any time the tensors saved outside of segments, every segment's inputs, and one
              segment's activations are alive; hence excluding layers makes it smaller
    compute   one more forward pass of the recomputed layers
    traffic   conversions between two layers of a segment communicate once more, at that moment,
              on all ranks; those at its borders do not

The results are the same: masks of dropout follow from step, row and feature, and running statistics
count a batch once.

Source: Chen et al. 2016 (arXiv:1604.06174); whether conversions are repeated or kept is a choice,
see Korthikanti et al. 2022 (arXiv:2205.05198, sec. 5).
"""

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any

from workbench.plan.extension.extension import extension_of, installed, name_of, named
from workbench.plan.extension.user_object import Own, OwnObjectError
from workbench.plan.graph.graph import Graph, Layer
from workbench.plan.io.errors import PlanError, alike, unknown
from workbench.plan.placement.placement import (
    ROWS,
    Layout,
    Replicate,
    checked_shares,
    group_sizes,
    is_share,
)
from workbench.plan.placement.rules import SPLITTABLE, Tokens
from workbench.plan.placement.schemes import (
    BUILT_IN,
    SCHEMES,
    Division,
    Scheme,
    Stated,
    divided,
    schemes_of,
)


@dataclass(frozen=True)
class LayerPlan:
    """How one layer is split, and whether it is recomputed.

    Attributes:
        scheme: the layer's scheme: the name of a built-in one, out of `schemes.SCHEMES`; or one of
            a person's own, which is held as `Own`: an object of a class that extends `Scheme`, that
            class, "module:attribute", or the name of an entry point of `workbench.schemes`.
        group_size: the number of ranks that form one shard group; 1 for `replicate`. In a group of
            one rank any scheme computes the whole layer.
        shares: the relative sizes of the pieces, one for each rank of the group; None: equal, or
            for `shard_in` the sizes of the input's sharding. `shard_heads` divides whole heads: a
            rank may have none, where there are fewer heads than ranks.
        recompute: whether its forward pass is recomputed in the backward pass, so that it saves
            nothing meanwhile (`plan/placement/layer_plan.py`).

    Raises:
        PlanError: an own scheme that extends another class than `Scheme`, or cannot be loaded.
    """

    scheme: Any = "replicate"
    group_size: int = 1
    shares: tuple[float, ...] | None = None
    recompute: bool = False

    def __post_init__(self) -> None:
        if type(self.scheme) is not str or self.scheme not in BUILT_IN:
            object.__setattr__(self, "scheme", as_scheme(self.scheme))

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "meant"}

    @property
    def is_own(self) -> bool:
        """Whether the scheme is a person's own."""
        return isinstance(self.scheme, Own)

    @property
    def is_at_hand(self) -> bool:
        """Whether this process has the scheme: a built-in one, an object of it, or an import."""
        return not isinstance(self.scheme, Own) or self.scheme.is_at_hand

    @property
    def name(self) -> str:
        """What the scheme is called in tables and errors."""
        return name_of(self.scheme)

    @cached_property
    def meant(self) -> Scheme:
        """The scheme itself.

        Raises:
            PlanError: an own one that this process cannot load.
        """
        if not isinstance(self.scheme, Own):
            return BUILT_IN[self.scheme]
        try:
            return Stated(extension_of(self.scheme, Scheme.kind))
        except OwnObjectError as error:
            raise PlanError(f"scheme {self.name!r}: {error}") from error

    def division(self, layer: Layer) -> Division:
        """The division of a layer's units over the group."""
        return divided(self.meant.units(layer), self.group_size, self.shares)

    def sums_back(self, given: Layout) -> bool:
        """Whether an input that is read whole has a gradient of summands, given the output."""
        return self.meant.summed_back and given.placement != Replicate()


def as_scheme(given: object) -> object:
    """The name of a built-in scheme, or the `Own` of another; unknown names stay as they are."""
    # To look at what is installed takes milliseconds, and plans have many layers.
    if isinstance(given, str) and given in SCHEMES:
        return str(given)
    if isinstance(given, str) and ":" not in given and given not in installed(Scheme.kind):
        return alike(given, SCHEMES) or given  # refused with the layer's name, where it is none
    try:
        found = named(given, Scheme.kind, SCHEMES)
    except ValueError as error:
        raise PlanError(f"scheme: {error}") from error
    if isinstance(found, Own) and name_of(found) in BUILT_IN:
        raise PlanError(f"scheme: {name_of(found)!r} is built in; an own one needs another name")
    return found


def placed_by_scheme(
    layer: Layer, choice: LayerPlan | None, coming: Layout
) -> tuple[Layout, Layout]:
    """The layouts of the input and output of a layer that has a scheme.

    Args:
        coming: the layout of its input before any conversion.
    """
    if choice is None or choice.group_size == 1:
        return ROWS, ROWS
    k = choice.group_size
    near = coming.placement if coming.group_size == k else None
    read, given = choice.meant.layouts(layer, choice.division(layer), near)
    return Layout(k, read), Layout(k, given)


def checked(
    graph: Graph, choices: Mapping[str, LayerPlan], world_size: int
) -> dict[str, LayerPlan]:
    """The choices that differ from the default, in the model's order: equal plans print alike."""
    for name in choices:
        require(graph, name)
    chosen = {}
    for layer in graph.layers:
        choice = choices.get(layer.name)
        if choice is not None:
            check(layer, choice, world_size)
            if choice != LayerPlan():
                chosen[layer.name] = choice
    return chosen


def checked_tokens(tokens: Tokens, choices: Mapping[str, LayerPlan]) -> Tokens:
    """Whether tokens are divided between cut layers, and how; equal shares are True."""
    if isinstance(tokens, bool):
        return tokens
    if not isinstance(tokens, Sequence) or isinstance(tokens, str):
        raise PlanError(
            f"shard_tokens must be True, False, or the relative tokens of each rank of a group, "
            f"got {tokens!r}"
        )
    for name, choice in choices.items():
        if choice.group_size not in (1, len(tokens)):
            raise PlanError(
                f"shard_tokens: {len(tokens)} shares {tuple(tokens)}, and layer {name!r} has "
                f"groups of {choice.group_size} ranks"
            )
    return checked_shares(tokens, len(tokens)) or True


def require(graph: Graph, name: str, valid: Sequence[str] = ()) -> None:
    """Checks that a layer has this name.

    Args:
        valid: the names to suggest instead; none: all layers that can be split.
    """
    try:
        graph[name]
    except KeyError:
        names = valid or [layer.name for layer in graph.layers if layer.kind in SPLITTABLE]
        raise PlanError(unknown("layer", name, names, of=graph.source.name)) from None


def check(layer: Layer, choice: LayerPlan, world_size: int) -> None:
    """Checks that the layer and the world allow a choice."""
    place = f"layer {layer.name!r}"
    _check_recompute(place, layer, choice.recompute)
    if choice.recompute and replace(choice, recompute=False) == LayerPlan():
        return  # which every layer can have
    if choice.is_own:
        if choice.is_at_hand:
            _check_own(layer, choice)
    else:
        _check_built_in(place, layer, choice)
    k = choice.group_size
    if isinstance(k, bool) or not isinstance(k, int) or k < 1 or world_size % k:
        valid = ", ".join(map(str, group_sizes(world_size)))
        raise PlanError(
            f"{place}: group_size {k!r} does not divide world_size {world_size}; valid are {valid}"
        )
    if choice.scheme == "replicate" and k != 1:
        raise PlanError(
            f"{place}: 'replicate' has group_size 1, got {k}; "
            f"whole weights over whole groups are 'duplicate'"
        )
    if choice.shares is not None:
        _check_shares(place, layer, choice, choice.shares)


def _check_built_in(place: str, layer: Layer, choice: LayerPlan) -> None:
    built_in = BUILT_IN.get(choice.scheme)
    if built_in is not None and built_in.takes(layer):
        return
    schemes = schemes_of(layer)
    if not schemes:
        raise PlanError(
            f"{place} is of kind {layer.kind!r} and follows its input; "
            f"a scheme can be chosen for {', '.join(SPLITTABLE)} layers"
        )
    raise PlanError(f"{place}: {unknown('scheme', str(choice.scheme), schemes)}")


def _check_own(layer: Layer, choice: LayerPlan) -> None:
    """Checks that an own scheme takes the layer; what it states is checked as it is asked."""
    scheme = choice.meant
    assert isinstance(scheme, Stated)
    if not scheme.takes(layer):
        raise PlanError(scheme.refusal(layer))


def _check_recompute(place: str, layer: Layer, recompute: bool) -> None:
    if not isinstance(recompute, bool):
        raise PlanError(f"{place}: recompute must be True or False, got {recompute!r}")
    if recompute and layer.rows == 0:
        raise PlanError(
            f"{place} is of kind {layer.kind!r} and keeps nothing of a batch: "
            f"recompute can be chosen for layers that see samples"
        )
    if recompute and layer.target.endswith("_") and not layer.target.endswith("__"):
        raise PlanError(
            f"{place} ({layer.target}) writes over its input, so that it cannot run again; "
            f"use {layer.target.rstrip('_')} in the model"
        )


def _check_shares(place: str, layer: Layer, choice: LayerPlan, shares: tuple[float, ...]) -> None:
    if choice.is_at_hand and not choice.meant.units(layer):
        raise PlanError(f"{place}: {choice.name!r} is not cut and takes no shares, got {shares}")
    if len(shares) != choice.group_size:
        raise PlanError(
            f"{place}: {len(shares)} shares {shares} for a group of {choice.group_size} ranks"
        )
    if not all(map(is_share, shares)):
        raise PlanError(f"{place}: shares must be numbers >= 0, got {shares}")
    if not any(shares):
        raise PlanError(f"{place}: all shares are zero, so that no rank would hold the layer")


def segments_of(graph: Graph, chosen: Set[str], apart: Set[str]) -> tuple[tuple[str, ...], ...]:
    """The segments of chosen layers, in execution order.

    Parameters and sizes depend on no sample and end no segment.

    Args:
        apart: the layers that run separately from the others, as a tail in rounds does.
    """
    runs: list[list[str]] = []
    going: bool | None = None  # whether the current run is one of `apart`
    for layer in graph.layers:
        if layer.rows == 0:
            continue
        if layer.name not in chosen:
            going = None
            continue
        if going is not (layer.name in apart):
            runs.append([])
            going = layer.name in apart
        runs[-1].append(layer.name)
    return tuple(map(tuple, runs))


def matching(patterns: Iterable[str], graph: Graph) -> list[str]:
    """The layers with these names, and those that match a pattern and process samples."""
    seeing = [layer.name for layer in graph.layers if layer.rows]
    every = {layer.name for layer in graph.layers}
    found: list[str] = []
    for pattern in patterns:
        fitting = [name for name in seeing if fnmatchcase(name, pattern)]
        if pattern in every:
            fitting = [pattern]  # refused later, with its reason
        if not fitting:
            raise PlanError(unknown("layer", pattern, seeing, of=graph.source.name))
        found += fitting
    return found


def choose(
    names: Iterable[str], choices: Mapping[str, LayerPlan], recompute: bool
) -> dict[str, LayerPlan]:
    """A plan's choices, in which these layers are recomputed or are not."""
    found = dict(choices)
    for name in names:
        found[name] = replace(found.get(name, LayerPlan()), recompute=recompute)
        if found[name] == LayerPlan():
            del found[name]  # the default of most layers
    return found
