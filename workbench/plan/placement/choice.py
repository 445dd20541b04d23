"""One layer's choice in a plan."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from workbench.plan.errors import PlanError
from workbench.plan.graph import Graph, Layer, unknown
from workbench.plan.placement.mesh import group_sizes
from workbench.plan.placement.rules import SPLITTABLE, schemes_of


@dataclass(frozen=True)
class LayerPlan:
    """How one layer is split, and whether it is recomputed.

    Attributes:
        scheme: the layer's scheme, one of `rules.SCHEMES`.
        group_size: the number of ranks that form one shard group; 1 for `replicate`.
        shares: the relative sizes of the pieces, one for each rank of the group; None: equal, or
            for `shard_in` the sizes of the input's sharding. `shard_heads` divides whole heads: a
            rank may have none, where there are fewer heads than ranks.
        recompute: whether its forward pass is recomputed in the backward pass, so that it saves
            nothing meanwhile (`plan/placement/recompute.py`).
    """

    scheme: str = "replicate"
    group_size: int = 1
    shares: tuple[float, ...] | None = None
    recompute: bool = False


def checked(
    graph: Graph, choices: Mapping[str, LayerPlan], world_size: int
) -> dict[str, LayerPlan]:
    """The choices that differ from the default, in the model's order: equal plans print alike.

    Raises:
        PlanError: a choice for an unknown layer, or an invalid one.
    """
    for name in choices:
        require(graph, name)
    chosen = {}
    for layer in graph.layers:
        choice = choices.get(layer.name)
        if choice is not None:
            together = layer.name in graph.shares_weights
            check(layer, choice, world_size, shares_weights=together)
            if choice != LayerPlan():
                chosen[layer.name] = choice
    return chosen


def require(graph: Graph, name: str, valid: Sequence[str] = ()) -> None:
    """Checks that a layer has this name.

    Args:
        graph: the model.
        name: the name of a layer.
        valid: the names to suggest instead; none: all layers that can be split.

    Raises:
        PlanError: there is no such layer; the nearest are suggested.
    """
    try:
        graph[name]
    except KeyError:
        names = valid or [layer.name for layer in graph.layers if layer.kind in SPLITTABLE]
        raise PlanError(unknown("layer", name, names, of=graph.source.name)) from None


def check(layer: Layer, choice: LayerPlan, world_size: int, *, shares_weights: bool) -> None:
    """Checks that the layer and the world allow a choice.

    Args:
        layer: the layer to be split.
        choice: the choice of how it is split.
        world_size: the number of ranks.
        shares_weights: whether another layer uses the same weights.

    Raises:
        PlanError: an invalid choice; the text names the layer, what was given and what is valid.
    """
    place = f"layer {layer.name!r}"
    _check_recompute(place, layer, choice.recompute)
    if choice.recompute and replace(choice, recompute=False) == LayerPlan():
        return  # which every layer can have
    schemes = schemes_of(layer)
    if not schemes:
        raise PlanError(
            f"{place} is of kind {layer.kind!r} and follows its input; "
            f"a scheme can be chosen for {', '.join(SPLITTABLE)} layers"
        )
    if choice.scheme not in schemes:
        raise PlanError(f"{place}: {unknown('scheme', str(choice.scheme), schemes)}")
    if shares_weights and choice.scheme != "replicate":
        raise PlanError(f"{place} shares its weights and can only be 'replicate'")
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
    if choice.scheme in ("replicate", "duplicate"):
        raise PlanError(f"{place}: {choice.scheme!r} is not cut and takes no shares, got {shares}")
    if len(shares) != choice.group_size:
        raise PlanError(
            f"{place}: {len(shares)} shares {shares} for a group of {choice.group_size} ranks"
        )
    if not all(isinstance(s, int | float) and math.isfinite(s) and s >= 0 for s in shares):
        raise PlanError(f"{place}: shares must be numbers >= 0, got {shares}")
    if not any(shares):
        raise PlanError(f"{place}: all shares are zero, so that no rank would hold the layer")
