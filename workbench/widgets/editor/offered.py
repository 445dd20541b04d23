"""What an editor's menus offer: schemes and rules, built in, installed, and a person's own."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from workbench.plan.extension.extension import extension_of, installed, name_of, named
from workbench.plan.extension.user_object import Own, OwnObjectError
from workbench.plan.graph.graph import Graph, Layer
from workbench.plan.io.errors import PlanError
from workbench.plan.placement.layer_plan import LayerPlan, as_scheme
from workbench.plan.placement.schemes import BUILT_IN, Scheme, schemes_of
from workbench.plan.plans.plan import Plan
from workbench.plan.plans.rule import BUILT_IN as RULES
from workbench.plan.plans.rule import GroupRule, Rule


class Offered:
    """The schemes and rules of one editor, by their names.

    Args:
        schemes: the person's own schemes, as `LayerPlan.scheme` takes them.
        rules: the person's own rules: objects or classes that extend `Rule`, "module:attribute",
            or names of entry points of `workbench.rules`.

    Attributes:
        complaints: what is installed and cannot be offered, with the reason.

    Raises:
        PlanError: one of them is no scheme, or no rule.
    """

    def __init__(self, schemes: Sequence[object] = (), rules: Sequence[object] = ()) -> None:
        self.complaints: list[str] = []
        self._own: dict[str, Own] = {}
        self.rules: dict[str, Rule] = dict(RULES)
        for name, own in installed(Scheme.kind).items():
            self._try(f"scheme {name!r}", partial(self._add_scheme, own))
        for name, own in installed(Rule.kind).items():
            self._try(f"rule {name!r}", partial(self._add_rule, own))
        for one in schemes:
            self._add_scheme(as_scheme(one))
        for one in rules:
            self._add_rule(one)

    def take(self, plan: Plan) -> bool:
        """Offers the own schemes of a plan, too; whether there are new ones among them."""
        of_plan = {
            choice.name: choice.scheme
            for choice in plan.layers.values()
            if choice.is_own and choice.is_at_hand
        }
        changed = any(self._own.get(name) != own for name, own in of_plan.items())
        self._own |= of_plan
        return changed

    def of(self, graph: Graph, layer: Layer) -> list[str]:
        """The names of the schemes that a layer can have; none where it follows its input."""
        built_in = list(schemes_of(layer))
        if layer.name in graph.shares_weights:
            return built_in
        own = [name for name, scheme in self._own.items() if _takes(scheme, layer)]
        return [*built_in, *own] if built_in or not own else ["replicate", *own]

    def scheme(self, given: object) -> object:
        """The scheme that is meant by a name of the menu, or by what a person gives."""
        if isinstance(given, str) and given not in BUILT_IN and given in self._own:
            return self._own[given]
        return as_scheme(given)

    def menu(self) -> list[dict[str, Any]]:
        """The rules, as views have them."""
        return [
            {
                "name": name,
                "description": rule.description,
                "grouped": isinstance(rule, GroupRule),
            }
            for name, rule in self.rules.items()
        ]

    def _add_scheme(self, given: object) -> None:
        if not isinstance(given, Own):
            raise PlanError(f"schemes: {given!r} is no scheme of your own")
        _ = LayerPlan(given).meant  # raises where it cannot be loaded
        self._own[name_of(given)] = given

    def _add_rule(self, given: object) -> None:
        try:
            own = named(given, Rule.kind, ())
            if not isinstance(own, Own):
                raise PlanError(f"rules: {given!r} is no rule of your own")
            rule: Rule = extension_of(own, Rule.kind)
        except PlanError:
            raise
        except ValueError as error:
            raise PlanError(f"rules: {error}") from error
        self.rules[rule.name] = rule

    def _try(self, what: str, add: Callable[[], None]) -> None:
        try:
            add()
        except (PlanError, OwnObjectError) as error:
            self.complaints.append(f"the installed {what} is not offered: {error}")


def _takes(scheme: Own, layer: Layer) -> bool:
    try:
        return LayerPlan(scheme).meant.takes(layer)
    except PlanError:  # its own code raised
        return False
