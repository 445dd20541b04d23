"""The memory map: what a rank holds at its peak, of which layer."""

from collections.abc import Mapping, Sequence
from typing import Any

import traitlets

from workbench.predict.prediction import Prediction
from workbench.widgets.explorers import memory_picture
from workbench.widgets.explorers.controls import Button, Choice, Control, Slider
from workbench.widgets.explorers.explorer import Explorer
from workbench.widgets.explorers.picture import Picture


class MemoryMap(Explorer):
    """A prediction's memory as areas: by category and layer, of one rank, at its peak.

    Args:
        prediction: whose memory; with a machine, its devices' memory is the limit.
        state: first values of the attributes.

    Attributes:
        prediction: as given; another one may be assigned.
        rank: whose memory is shown; it begins with the fullest.
        by: what areas are put together by: "category" or "layer".
        inside: one category or layer alone; "": all.

    Raises:
        TypeError: no prediction.
        TraitError: a value that cannot be.
    """

    prediction = traitlets.Instance(Prediction)
    rank = traitlets.Int(0)
    by = traitlets.Enum(("category", "layer"), "category")
    inside = traitlets.Unicode()

    def __init__(self, prediction: Prediction, **state: Any) -> None:
        require(prediction, "MemoryMap")
        super().__init__(**{"prediction": prediction, "rank": _fullest(prediction), **state})
        self.observe(self._another, ["prediction"])
        self.observe(self._moved, ["inside"])

    def controls(self) -> Sequence[Control]:
        """The rank, how areas are put together, and a way out of one of them."""
        ranks = range(self._world)
        whole = Button("whole", "Show all", "" if self.inside else "all is shown")
        order = Choice("by", "areas by", {"category, then layer": "category",
                                          "layer, then category": "layer"})  # fmt: skip
        return (Slider("rank", "rank", ranks, str), order, whole)

    def picture(self) -> Picture:
        """Two drawings: the rank's areas, and the peaks of all ranks."""
        memory = self.prediction.memory
        rank = memory[self.rank]
        known = memory_picture.grouped({k: n for k, n in rank.held.items() if n}, self.by)
        inside = self.inside if self.inside in known else ""
        peaks = [each.peak_bytes for each in memory.ranks]
        name = self.prediction.experiment.plan.graph.source.name
        return memory_picture.of(rank, peaks, self.by, inside, self.prediction.machine, name)

    def press(self, name: str) -> None:
        """Shows everything again."""
        if name != "whole":
            super().press(name)
        self.inside = ""

    def pick(self, name: str) -> None:
        """Looks into a group of areas, and back; or at another rank."""
        if name.startswith("rank ") and name[5:].isdecimal():
            self.rank = int(name[5:])
        else:
            self.inside = "" if self.inside == name else name

    @property
    def _world(self) -> int:
        return self.prediction.experiment.plan.world_size

    def _another(self, change: Mapping[str, Any]) -> None:
        with self._guard:
            if self.rank >= self._world:
                self.rank = _fullest(self.prediction)
            self.inside = ""
            self._moved(change)

    @traitlets.validate("rank")
    def _is_a_rank(self, proposal: Mapping[str, Any]) -> int:
        rank: int = proposal["value"]
        if not 0 <= rank < self._world:
            raise traitlets.TraitError(f"rank must be 0 to {self._world - 1}, got {rank}")
        return rank


def _fullest(prediction: Prediction) -> int:
    memory = prediction.memory
    most = memory.peak_bytes
    return next(each.rank for each in memory.ranks if each.peak_bytes == most)


def require(prediction: Any, what: str) -> Prediction:
    """The prediction; raises TypeError where it is none."""
    if not isinstance(prediction, Prediction):
        raise TypeError(
            f"{what} takes a Prediction, got {type(prediction).__name__}; "
            "wb.predict(plan, machine, experiment) makes one"
        )
    return prediction
