"""Plan rules: what makes a whole plan for any model; the editor's menu offers them.

    data parallel   every layer replicated
    hybrid          SplitBrain's division, over groups of any size (`presets.py`)
    filters         heterogeneous model parallelism, over groups of any size (`filters.py`)

A rule of a person's own extends `Rule`, or `GroupRule` where the menu is to offer it for every size
of groups.
"""

from abc import ABC, abstractmethod
from types import MappingProxyType
from typing import ClassVar

from workbench.plan.errors import PlanError
from workbench.plan.extension.extension import Extension
from workbench.plan.graph import Graph
from workbench.plan.plan import Plan


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
    """The plan that a rule makes, which is checked to be one for this model and these ranks.

    Args:
        rule: the rule.
        graph: the model.
        world_size: the number of ranks.
        group_size: the number of ranks in a group, for a `GroupRule`; None: all.

    Raises:
        PlanError: the rule raised, or made something else; the text names it.
    """
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
