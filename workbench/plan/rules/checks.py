"""What a plan rule is checked for: plans that are valid, the same each time, and survive a text."""

from collections.abc import Callable, Sequence

from workbench.plan.errors import PlanError
from workbench.plan.extension.extension import Check
from workbench.plan.graph import Graph
from workbench.plan.plan import Plan
from workbench.plan.rules.rule import Rule, plan_by

WORLDS = (1, 2, 4)


def checks_of(rule: Rule, graphs: Sequence[Graph], worlds: Sequence[int] = WORLDS) -> list[Check]:
    """Checks a rule on several models and numbers of ranks.

    Args:
        rule: the rule.
        graphs: the models.
        worlds: the numbers of ranks.
    """
    cases = [(graph, world) for graph in graphs for world in worlds]
    made: dict[int, Plan] = {}

    def plan(index: int) -> Plan:
        if index not in made:
            made[index] = plan_by(rule, *cases[index])
        return made[index]

    def valid(index: int) -> str:
        _ = plan(index).flow.weights, plan(index).evaluation, plan(index).segments
        return ""

    def alike(index: int) -> str:
        again = plan_by(rule, *cases[index])
        if again.to_toml() == plan(index).to_toml():
            return ""
        return f"once {plan(index)!r}, and then {again!r}"

    def survives(index: int) -> str:
        back = Plan.from_toml(plan(index).to_toml(), cases[index][0])
        return "" if back == plan(index) else f"it comes back as {back!r}"

    return [
        _check("it makes a valid plan for every model and number of ranks", cases, valid),
        _check("it makes equal plans of equal arguments", cases, alike),
        _check("its plans survive their text", cases, survives),
    ]


def _check(what: str, cases: Sequence[tuple[Graph, int]], find: Callable[[int], str]) -> Check:
    """One check of all cases; the first complaint is what it says."""
    for index, (graph, world) in enumerate(cases):
        try:
            complaint = find(index)
        except PlanError as error:
            complaint = str(error)
        if complaint:
            return Check(what, False, f"{graph.source.name} on {world} ranks: {complaint}")
    return Check(what, True, f"{len(cases)} plans")
