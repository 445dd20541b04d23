"""Plan rules: what makes a whole plan for any model; the editor's menu offers them.

    data parallel   every layer replicated
    hybrid          SplitBrain's division, over groups of any size (`presets.py`)
    filters         heterogeneous model parallelism, over groups of any size (`filters.py`)

A rule of a person's own extends `Rule`, or `GroupRule` where the menu is to offer it for every size
of groups.

What a plan rule is checked for: plans that are valid, the same each time, and survive a text.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from types import MappingProxyType
from typing import ClassVar

from workbench.plan.extension.extension import Check, Extension
from workbench.plan.graph.graph import Graph
from workbench.plan.io.errors import PlanError
from workbench.plan.plans.plan import Plan


class Rule(Extension, ABC):
    """A rule by which any model gets a plan.

    Attributes:
        description: one sentence on what it does, for the menu.
    """

    kind: ClassVar[str] = "rules"
    description: str = ""

    @abstractmethod
    def plan(self, graph: Graph, world_size: int) -> Plan:
        """The plan of a model for so many ranks; of equal arguments, equal ones.

        Raises:
            PlanError: there is none; the text says why.
        """


class GroupRule(Rule):
    """A rule whose plans depend on the size of groups, too."""

    @abstractmethod
    def plan(self, graph: Graph, world_size: int, group_size: int | None = None) -> Plan:
        """The plan of a model for so many ranks, in groups of this size; None: of all ranks.

        Raises:
            PlanError: there is none; the text says why.
        """


class DataParallel(Rule):
    """Every layer replicated, every rank with its own rows."""

    name = "data parallel"
    description = "every layer replicated, every rank with its own rows"

    def plan(self, graph: Graph, world_size: int) -> Plan:
        return Plan.data_parallel(graph, world_size)


class Hybrid(GroupRule):
    """`Plan.hybrid`."""

    name = "hybrid"
    description = "convolutions replicated, large linear layers and attention sharded in groups"

    def plan(self, graph: Graph, world_size: int, group_size: int | None = None) -> Plan:
        return Plan.hybrid(graph, world_size, group_size)


class Filters(GroupRule):
    """`Plan.filters`, with equal shares."""

    name = "filters"
    description = "every layer's filters divided over groups, in pairs of layers"

    def plan(self, graph: Graph, world_size: int, group_size: int | None = None) -> Plan:
        return Plan.filters(graph, world_size, group_size=group_size)


BUILT_IN = MappingProxyType({rule.name: rule for rule in (DataParallel(), Hybrid(), Filters())})


def plan_by(rule: Rule, graph: Graph, world_size: int, group_size: int | None = None) -> Plan:
    """The plan that a rule makes, which is checked to be one for this model and these ranks."""
    try:
        if isinstance(rule, GroupRule):
            plan: object = rule.plan(graph, world_size, group_size)
        else:
            plan = rule.plan(graph, world_size)
    except Exception as error:  # whatever its own code raises
        kind = "" if isinstance(error, PlanError) else f"{type(error).__name__}: "
        raise PlanError(f"rule {rule.name!r}: {kind}{error}") from error
    if not isinstance(plan, Plan):
        raise PlanError(f"rule {rule.name!r} made no Plan, but {type(plan).__name__}: {plan!r}")
    if plan.graph != graph or plan.world_size != world_size:
        raise PlanError(
            f"rule {rule.name!r} made a plan of {plan.graph.source.name} for {plan.world_size} "
            f"ranks, and not of {graph.source.name} for {world_size}"
        )
    return plan


WORLDS = (1, 2, 4)


def checks_of(rule: Rule, graphs: Sequence[Graph], worlds: Sequence[int] = WORLDS) -> list[Check]:
    """Checks a rule on several models and numbers of ranks."""
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
