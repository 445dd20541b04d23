"""A scheme of a person's own, of which every statement is checked where it is made.

The rest of the house asks it as it asks a built-in one: a statement that cannot be is refused by
the names of scheme and layer, before anything runs. What can be, and yet is wrong, such as a piece
that is not the one that a rank computes with, is found by `cluster.verify`.
"""

from collections.abc import Callable
from typing import Any, TypeVar

from workbench.plan.errors import PlanError
from workbench.plan.graph import Layer, Weight
from workbench.plan.placement.placement import Partial, Placement, Replicate, Shard
from workbench.plan.placement.schemes import Division, Scheme

T = TypeVar("T")

# Why no scheme of a person's own can have a layer of these kinds.
_REFUSED = {
    "batch_norm": "its statistics are those of the rows and channels that its input has",
    "parameter": "it reads no sample",
    "size": "it reads no sample",
}


class Stated(Scheme):
    """What an own scheme states, checked.

    Args:
        scheme: the scheme.
    """

    def __init__(self, scheme: Scheme) -> None:
        self.scheme, self.name, self.summed_back = scheme, scheme.name, scheme.summed_back

    def takes(self, layer: Layer) -> bool:
        if _unsuitable(layer):
            return False
        return bool(self._asked(layer, "takes", lambda: self.scheme.takes(layer)))

    def refusal(self, layer: Layer) -> str:
        """Why a layer cannot have it."""
        why = _unsuitable(layer) or f"its `takes` refuses it ({layer.kind}, {layer.target})"
        return f"layer {layer.name!r} cannot have the scheme {self.name!r}: {why}"

    def units(self, layer: Layer) -> int:
        units = self._asked(layer, "units", lambda: self.scheme.units(layer))
        if isinstance(units, bool) or not isinstance(units, int) or units < 0:
            raise self._error(layer, f"`units` must be an integer >= 0, got {units!r}")
        return units

    def layouts(
        self, layer: Layer, division: Division, coming: Placement | None
    ) -> tuple[Placement, Placement]:
        both = self._asked(layer, "layouts", lambda: self.scheme.layouts(layer, division, coming))
        if not (isinstance(both, tuple) and len(both) == 2):
            raise self._error(
                layer, f"`layouts` must be (of the input, of the output), got {both!r}"
            )
        read, given = both
        self._check_activation(layer, "input", read, layer.input_shape, division)
        self._check_activation(layer, "output", given, layer.output_shape, division)
        if isinstance(read, Partial):
            raise self._error(layer, "its input is P, and no layer can read summands")
        for rank, size in enumerate(division.sizes):
            if size == 0 and layer.kind != "attention" and not _nothing(read, given, rank):
                raise self._error(
                    layer,
                    f"rank {rank} of a group would have none of the {sum(division.sizes)} units "
                    f"{division.sizes}, and yet read {read} and give {given}: every rank needs a "
                    f"unit",
                )
        return read, given

    def holds(
        self, layer: Layer, weight: Weight, division: Division, read: Placement
    ) -> Replicate | Shard:
        name = layer.within(weight)
        placement = self._asked(
            layer, "holds", lambda: self.scheme.holds(layer, weight, division, read)
        )
        what = f"`holds` places {name!r} {weight.shape}"
        match placement:
            case Shard():
                self._check_shard(layer, what, placement, weight.shape, division, first=0)
            case Replicate():
                given = self.layouts(layer, division, read)[1]
                alike = read == given == Replicate()
                if weight.trainable and layer.kind != "attention" and not alike:
                    raise self._error(
                        layer,
                        f"{what} whole on every rank, while each rank computes something else with "
                        f"it ({read} to {given}): its gradient would differ by rank; cut it, or "
                        f"hold it on one rank (`held_by`)",
                    )
            case _:
                raise self._error(layer, f"{what}: Replicate() or a Shard, got {placement!r}")
        return placement

    def local(self, module: Any, layer: Layer, division: Division, member: int) -> Any:
        return self._asked(
            layer, "local", lambda: self.scheme.local(module, layer, division, member)
        )

    def flops(
        self, layer: Layer, division: Division, member: int, read: Placement, given: Placement
    ) -> float:
        share = self._asked(
            layer, "flops", lambda: self.scheme.flops(layer, division, member, read, given)
        )
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share <= 1:
            raise self._error(layer, f"`flops` must be a share from 0 to 1, got {share!r}")
        return float(share)

    def heads(self, layer: Layer, division: Division) -> tuple[int, ...] | None:
        heads = self._asked(layer, "heads", lambda: self.scheme.heads(layer, division))
        if heads is not None and (len(heads) != division.group_size or sum(heads) != layer.heads):
            raise self._error(
                layer,
                f"`heads` must be the heads of {division.group_size} ranks, {layer.heads} in all, "
                f"got {heads!r}",
            )
        return heads

    def _asked(self, layer: Layer, method: str, ask: Callable[[], T]) -> T:
        try:
            return ask()
        except PlanError:
            raise
        except Exception as error:  # whatever its own code raises
            raise self._error(
                layer, f"`{method}` raised {type(error).__name__}: {error}"
            ) from error

    def _error(self, layer: Layer, why: str) -> PlanError:
        return PlanError(f"layer {layer.name!r}, scheme {self.name!r}: {why}")

    def _check_activation(
        self,
        layer: Layer,
        which: str,
        placement: Placement,
        shape: tuple[int, ...],
        division: Division,
    ) -> None:
        if not isinstance(placement, Shard):
            if isinstance(placement, Replicate | Partial):
                return
            raise self._error(
                layer, f"the {which} is Replicate(), Partial() or a Shard, got {placement!r}"
            )
        what = f"`layouts` cuts the {which} {shape}"
        self._check_shard(layer, what, placement, (0, *shape), division, first=1)
        if placement.blocks > 1:
            raise self._error(
                layer,
                f"{what} in {placement.blocks} blocks: conversions move consecutive pieces of "
                f"activations; blocks are for weights",
            )

    def _check_shard(
        self,
        layer: Layer,
        what: str,
        cut: Shard,
        shape: tuple[int, ...],
        division: Division,
        first: int,
    ) -> None:
        if not first <= cut.dim < len(shape):
            dims = f"{first} to {len(shape) - 1}"
            raise self._error(layer, f"{what} along dimension {cut.dim}; there are {dims}")
        if len(cut.sizes) != division.group_size:
            raise self._error(
                layer,
                f"{what} into {len(cut.sizes)} pieces {cut.sizes} for a group of "
                f"{division.group_size} ranks",
            )
        if cut.extent != shape[cut.dim]:
            raise self._error(
                layer,
                f"{what} into {cut}, which are {cut.extent} elements of the {shape[cut.dim]} along "
                f"dimension {cut.dim}",
            )


def _nothing(read: Placement, given: Placement, member: int) -> bool:
    """Whether a rank reads nothing, or gives nothing."""
    return any(isinstance(cut, Shard) and cut.sizes[member] == 0 for cut in (read, given))


def _unsuitable(layer: Layer) -> str:
    """Why a layer can have no scheme of a person's own; "": it can."""
    if layer.kind in _REFUSED:
        return f"it is of kind {layer.kind!r}: {_REFUSED[layer.kind]}"
    if layer.rows == 0 or not layer.inputs:
        return "it depends on no sample"
    if layer.random and layer.kind != "attention":
        return "it draws random numbers, which would depend on the split"
    if not layer.calls_module:
        return f"it is a function ({layer.target}); a scheme is for a module of the model"
    if len(dict.fromkeys(layer.inputs)) > 1:
        return f"it reads several tensors ({', '.join(layer.inputs)})"
    return ""
