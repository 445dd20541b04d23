"""The result of a search, with the reasons for each layer's choice."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.plan.io.html import Markup, element, folded, frame_of, save, table
from workbench.plan.io.units import size
from workbench.plan.placement.layer_plan import LayerPlan
from workbench.plan.plans.plan import Plan
from workbench.predict.prediction import Prediction
from workbench.predict.search.evaluation import EvaluatedPlan
from workbench.predict.search.question import Question
from workbench.predict.search.relaxation import Priced
from workbench.predict.search.trellis import Trellis

if TYPE_CHECKING:
    import pandas

_SHOWN = 12

_ROUNDING_S = 1e-12


@dataclass(frozen=True)
class Option:
    """One choice that a layer had.

    Attributes:
        choice: the scheme, group size and shares.
        more_s: the seconds by which the lower bound of the best plan with this choice exceeds that
            of the best plan of all.
    """

    choice: LayerPlan
    more_s: float


@dataclass(frozen=True)
class Reason:
    """Why a layer got its scheme.

    Attributes:
        layer: the layer's name.
        chosen: the choice that it got.
        pinned: whether the user had fixed it.
        options: the choices that it had, the cheapest first.
    """

    layer: str
    chosen: LayerPlan
    pinned: bool
    options: tuple[Option, ...]

    def __str__(self) -> str:
        if self.pinned:
            return f"{self.layer}: {named(self.chosen)}, as pinned"
        others = [o for o in self.options if not _alike(o.choice, self.chosen)]
        if not others:
            return f"{self.layer}: {named(self.chosen)}, the only choice"
        listed = ", ".join(f"{named(o.choice)} {_difference(o.more_s)}" for o in others[:3])
        return f"{self.layer}: {named(self.chosen)}; instead: {listed}"


@dataclass(frozen=True, repr=False)
class SearchResult:
    """The plan with the least predicted step time among those that fit.

    Attributes:
        plan: the best plan found.
        prediction: the prediction of this plan.
        bound: a lower bound in seconds: no plan that was asked for and fits is predicted to take
            less; plans that divide tokens or run in rounds are left out of it.
        seconds: the seconds that the search took.
        memory_limit: the memory limit of a rank, in bytes.
        judged: the number of plans that were predicted in full.
        plans: the number of combinations of schemes, group sizes and shares.
    """

    plan: Plan
    prediction: Prediction
    bound: float
    seconds: float
    memory_limit: int
    judged: int
    plans: int
    _why: Callable[[], Mapping[str, Reason]] = field(compare=False)
    _pareto: Callable[[], tuple[EvaluatedPlan, ...]] = field(compare=False)

    @cached_property
    def step_time(self) -> float:
        """Predicted seconds of a step."""
        return float(self.prediction.step_time)

    @property
    def gap(self) -> float:
        """How much faster a better plan could be at most, relative to the step time; 0: none is."""
        return max(0.0, 1 - self.bound / self.step_time)

    @cached_property
    def why(self) -> Mapping[str, Reason]:
        """The options of each layer that can be split, and what the others would cost."""
        return self._why()

    @cached_property
    def pareto(self) -> tuple[EvaluatedPlan, ...]:
        """The evaluated plans that none beats in both time and memory, the fastest first."""
        return self._pareto()

    def __getstate__(self) -> dict[str, Any]:
        why, pareto = self.why, self.pareto
        known = {name: value for name, value in self.__dict__.items() if name[0] != "_"}
        return {**known, "why": dict(why), "pareto": pareto}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    def __repr__(self) -> str:
        proven = "proven best" if self.gap == 0 else f"at most {self.gap:.2%} above the best"
        if self.plan.rounds != "BK":
            proven += " of plans without rounds"
        return (
            f"<SearchResult {self.plan.graph.source.name} on {self.plan.world_size} ranks: "
            f"{self.step_time * 1e3:,.4g} ms a step, {proven}; "
            f"{size(self.prediction.memory.peak_bytes)} of {size(self.memory_limit)}; "
            f"{self.judged} of {self.plans:.3g} plans predicted in {self.seconds:.2f} s>"
        )

    def __str__(self) -> str:
        reasons = [str(reason) for reason in self.why.values()]
        more = [f"... {len(reasons) - _SHOWN} more layers"] if len(reasons) > _SHOWN else []
        return "\n".join([repr(self), *reasons[:_SHOWN], *more, "", *self._front_lines()])

    def _front_lines(self) -> list[str]:
        return [
            f"{one.step_time * 1e3:10,.4g} ms  {size(one.peak_bytes):>12}  {summary(one.plan)}"
            for one in self.pareto
        ]

    def to_frame(self) -> "pandas.DataFrame":
        """One line for each plan of `pareto`, the fastest first: seconds, bytes, what it splits."""
        rows = (
            {"step_s": one.step_time, "peak_bytes": one.peak_bytes, "plan": summary(one.plan)}
            for one in self.pareto
        )
        return frame_of(rows, ("step_s", "peak_bytes", "plan"))

    def save(self, path: str | Path) -> None:
        """Writes it into a file: "x.csv" is `to_frame`, "x.html" a page with reasons.

        Raises:
            ValueError: the name has another ending.
        """
        save(self, path)

    def _repr_html_(self) -> Markup:
        reasons = [
            (reason.layer, named(reason.chosen), str(reason).partition(": ")[2])
            for reason in self.why.values()
        ]
        front = [
            (f"{one.step_time * 1e3:,.4g} ms", size(one.peak_bytes), summary(one.plan))
            for one in self.pareto
        ]
        return element(
            "div",
            element("p", repr(self)[1:-1]),
            table(("step", "peak", "plan"), front),
            folded("why", table(("layer", "scheme", "why"), reasons)),
        )


def named(choice: LayerPlan) -> str:
    """The name of a choice, such as "shard_out/4"."""
    if choice.scheme == "replicate":
        return "replicate"
    shares = f" by {'/'.join(map('{:g}'.format, choice.shares))}" if choice.shares else ""
    return f"{choice.name}/{choice.group_size}{shares}"


def summary(plan: Plan) -> str:
    """A plan in one line: how many layers have which scheme."""
    counts: dict[str, int] = {}
    for choice in plan.layers.values():
        if choice.scheme != "replicate":
            counts[named(choice)] = counts.get(named(choice), 0) + 1
    parts = [f"{count} {name}" for name, count in counts.items()] or ["data parallel"]
    if plan.rounds != "BK":
        parts.append(f"rounds {plan.rounds}")
    again = sum(choice.recompute for choice in plan.layers.values())
    return ", ".join(parts + ([f"{again} recomputed"] if again else []))


def _alike(one: LayerPlan, other: LayerPlan) -> bool:
    return named(one) == named(other)


def _difference(seconds: float) -> str:
    """A difference such as "+2.1 ms"; rounding errors are shown as 0."""
    return "+0 ms" if abs(seconds) < _ROUNDING_S else f"{seconds * 1e3:+.3g} ms"


def reasons_of(
    question: Question,
    trellis: Trellis,
    priced: Priced,
    ways: Sequence[tuple[Mapping[str, LayerPlan], float]],
    plan: Plan,
) -> Mapping[str, Reason]:
    """Each layer's options, by the cheapest plan through each.

    Args:
        question: the arguments of the search.
        trellis: the trellis of all plans that hold tables as the plan does.
        priced: the prices at which plans are compared.
        ways: all ways to hold tables, by the choices of their layers, each with the seconds of the
            cheapest plan at these prices.
        plan: the plan that was found.
    """
    through = priced.paths.through()
    found = {}
    for layer, stage, costs in zip(trellis.layers, trellis.stages, through, strict=True):
        choices = trellis.options.get(layer.name)
        if choices is None:
            continue
        least = np.full(len(choices), np.inf)
        np.minimum.at(least, stage.choice, costs)
        for way, seconds in ways:
            if layer.name in way:
                place = choices.index(way[layer.name])
                least[place] = min(least[place], seconds)
        order = [place for place in np.argsort(least, kind="stable") if least[place] < np.inf]
        options = tuple(
            Option(choices[index], float(least[index] - priced.paths.cheapest)) for index in order
        )
        chosen = plan.layers.get(layer.name, LayerPlan())
        found[layer.name] = Reason(layer.name, chosen, layer.name in question.pinned, options)
    return found
