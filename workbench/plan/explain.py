"""Why a hybrid plan cuts what it cuts, in a few lines; all of it follows from the plan itself."""

from itertools import groupby
from typing import TYPE_CHECKING

from workbench.plan.choice import LayerPlan
from workbench.plan.presets import HEAVY, LARGE, Verdict, alike, followed, verdicts

if TYPE_CHECKING:
    from workbench.plan.plan import Plan

RULE = (
    "Rule: convolutions stay whole; a linear or attention layer is cut that has >= "
    f"{LARGE:.0%} of the parameters of the largest such layer, and whose share of the model's "
    f"parameters is >= {HEAVY:g} times its share of the FLOPs."
)
_WHY = {
    "cut": "cut",
    "convolution": "whole, convolutions",
    "small": f"whole, < {LARGE:.0%} of the largest",
    "light": f"whole, parameters < {HEAVY:g} times FLOPs",
    "shared": "whole, weights shared with another layer",
}
_NAMES = 3


def explained(plan: "Plan") -> list[str]:
    """The rule, what it says of the model's layers, and where the plan is otherwise.

    Nothing for a plan that does not follow the rule in at least half of its layers.
    """
    ruled = followed(plan.graph, plan.layers)
    if not ruled:
        return []
    found = sorted(verdicts(plan.graph), key=_order)
    lines = [RULE]
    for _, group in groupby(found, key=_order):
        lines.append(_line(list(group)))
    for name in dict.fromkeys((*ruled, *plan.layers)):
        rule, chosen = (of.get(name, LayerPlan()) for of in (ruled, plan.layers))
        if not alike(rule, chosen):
            lines.append(f"  otherwise: {name} is {_shown(chosen)}; by the rule {_shown(rule)}")
    return lines


def _order(verdict: Verdict) -> tuple[int, str]:
    return list(_WHY).index(verdict.reason), verdict.layer.kind


def _line(group: list[Verdict]) -> str:
    """One line for all layers of a kind that have the same verdict."""
    first, count = group[0], len(group)
    names = ", ".join(verdict.layer.name for verdict in group[:_NAMES])
    more = f", ... {count - _NAMES} more" if count > _NAMES else ""
    parameters = _percent(sum(verdict.parameters for verdict in group))
    flops = _percent(sum(verdict.flops for verdict in group))
    return (
        f"  {_WHY[first.reason]}: {count} {first.layer.kind}, {parameters} of the parameters, "
        f"{flops} of the FLOPs ({names}{more})"
    )


def _percent(share: float) -> str:
    return "<0.1%" if 0 < share < 0.001 else f"{share:.1%}"


def _shown(choice: LayerPlan) -> str:
    if choice.scheme == "replicate":
        return choice.scheme
    shares = f" by {'/'.join(map('{:g}'.format, choice.shares))}" if choice.shares else ""
    return f"{choice.scheme}/{choice.group_size}{shares}"
