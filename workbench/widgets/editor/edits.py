"""Edits: what a person has chosen in the editor, as the plan that it leads to."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from workbench.plan.extension.extension import name_of
from workbench.plan.extension.user_object import Own
from workbench.plan.graph.graph import Graph, Layer
from workbench.plan.io.errors import PlanError, unknown
from workbench.plan.placement.layer_plan import LayerPlan, check
from workbench.plan.placement.placement import group_sizes
from workbench.plan.placement.rounds import RoundsError
from workbench.plan.placement.rules import Tokens
from workbench.plan.placement.schemes import schemes_of
from workbench.plan.placement.tied import together
from workbench.plan.plans.plan import Plan
from workbench.plan.plans.rule import GroupRule, Rule, plan_by

EQUAL = "equal"

# What can be said of a layer, and of a whole plan.
FIELDS = ("scheme", "group", "shares", "recompute")
WHOLE = ("world_size", "rounds", "batch_norm", "rows", "tokens")


@dataclass(frozen=True)
class Edited:
    """What became of an edit.

    Attributes:
        notes: what else changed, and why.
    """

    plan: Plan
    what: str
    notes: tuple[str, ...] = ()


def edited(plan: Plan, layers: Sequence[str], field: str, value: Any) -> Edited:
    """The plan in which these layers have another value in one field.

    Of several layers, those that can never have the value stay as they are: a scheme is given to
    those that can be split so, a group size and shares to those that lie over groups.

    Args:
        plan: the plan as it is.
        layers: names of the layers.
        field: one of `FIELDS`.
        value: a scheme, as `LayerPlan` takes it; a group size; shares as text ("3 1", "" for none);
            whether to recompute.

    Raises:
        PlanError: a choice that cannot be; the text names the layer and what is valid.
    """
    if field not in FIELDS:
        raise PlanError(unknown("field", field, FIELDS))
    chosen = _affected(plan, layers, field, value)
    choices = dict(plan.layers)
    for name in chosen:
        now = choices.get(name, LayerPlan())
        changed = _changed(plan, now, field, value)
        choices |= together(plan.graph, name, changed, choices, plan.world_size)
        if now.is_own and choices[name] == LayerPlan():
            del choices[name]  # it follows its input again
    what = f"{field} of {_counted(chosen)}: {_value_text(value)}"
    notes = []
    if len(chosen) < len(layers):
        notes.append(f"{len(layers) - len(chosen)} of {len(layers)} layers cannot have it")
    try:
        return Edited(replace(plan, layers=choices), what, tuple(notes))
    except RoundsError as error:
        # As `Plan.with_layer` does: one edit at a time leads anywhere.
        notes.append(f"rounds {plan.rounds!r} became 'BK': {error}")
        return Edited(replace(plan, layers=choices, rounds="BK"), what, tuple(notes))


def whole(plan: Plan, field: str, value: Any) -> Edited:
    """The plan with another world size, rounds, mode of batch norm, or shares of rows or tokens.

    Raises:
        PlanError: a value that cannot be.
    """
    makers: Mapping[str, Callable[[], Plan]] = {
        "world_size": lambda: plan.with_world_size(_integer("world_size", value)),
        "rounds": lambda: plan.with_rounds(value),
        "batch_norm": lambda: plan.with_batch_norm(value),
        "rows": lambda: plan.with_rows(shares_of(value)),
        "tokens": lambda: plan.with_shard_tokens(tokens_of(value)),
    }
    if field not in makers:
        raise PlanError(unknown("field", field, WHOLE))
    return Edited(makers[field](), f"{field.replace('_', ' ')}: {_value_text(value)}")


def preset(
    graph: Graph, world_size: int, rules: Mapping[str, Rule], name: str, group_size: int | None
) -> Edited:
    """A plan by a rule, out of those that are offered.

    Raises:
        PlanError: no such rule, a group size that does not divide the world, or a rule of a
            person's own that made no plan for this model.
    """
    if name not in rules:
        raise PlanError(unknown("rule", name, rules))
    grouped = isinstance(rules[name], GroupRule)
    over = f" over groups of {group_size or world_size}" if grouped else ""
    return Edited(plan_by(rules[name], graph, world_size, group_size), f"{name}{over}")


def shares_of(text: Any) -> tuple[float, ...] | None:
    """Shares from what people write: "3 1", "3, 1" or "3:1"; None for nothing.

    Raises:
        PlanError: something that is no number.
    """
    words = [word for word in re.split(r"[\s,;:/]+", str(text).strip()) if word]
    if not words:
        return None
    try:
        return tuple(float(word) if "." in word or "e" in word else int(word) for word in words)
    except ValueError:
        raise PlanError(f"shares are numbers such as '3 1', got {text!r}") from None


def tokens_of(text: Any) -> Tokens:
    """Divided tokens from what people write: "equal", shares, or nothing for rows of one's own.

    Raises:
        PlanError: something else.
    """
    if str(text).strip().lower() == EQUAL:
        return True
    return shares_of(text) or False


def tokens_text(tokens: Tokens) -> str:
    """The same as text."""
    if isinstance(tokens, bool):
        return EQUAL if tokens else ""
    return " ".join(f"{share:g}" for share in tokens)


def options_of(world_size: int) -> list[int]:
    """The group sizes that a layer can be given."""
    return list(group_sizes(world_size))


def _affected(plan: Plan, layers: Sequence[str], field: str, value: Any) -> list[str]:
    """The layers for which an edit means something; of a single one that is left to the plan."""
    for name in layers:
        if name not in plan.graph.consumers or name in plan.graph.sources:
            raise PlanError(unknown("layer", str(name), [x.name for x in plan.graph.layers]))
    if len(layers) == 1:
        return list(layers)
    graph, now = plan.graph, plan.layers

    def means(name: str) -> bool:
        if field == "scheme":
            shared = name in graph.shares_weights and value != "replicate"
            return not shared and _takes(graph[name], value)
        if field == "recompute":
            return _accepts(plan, name, bool(value))
        return name in now and now[name].scheme != "replicate"

    found = [name for name in layers if means(name)]
    if not found:
        first = "; choose a scheme that splits them first" if field in ("group", "shares") else ""
        raise PlanError(
            f"none of these {len(layers)} layers can have {field} {_value_text(value)}{first}"
        )
    return found


def _takes(layer: Layer, scheme: object) -> bool:
    """Whether a layer can have a scheme; any that follows its input can go back to that."""
    choice = LayerPlan(scheme)
    if choice.is_own:
        return choice.meant.takes(layer)
    return choice.scheme in schemes_of(layer)


def _accepts(plan: Plan, name: str, recompute: bool) -> bool:
    choice = replace(plan.layers.get(name, LayerPlan()), recompute=recompute)
    try:
        check(plan.graph[name], choice, plan.world_size)
    except PlanError:
        return False
    return True


def _changed(plan: Plan, now: LayerPlan, field: str, value: Any) -> LayerPlan:
    match field:
        case "scheme":
            apart = now.group_size if now.group_size > 1 else plan.world_size
            return LayerPlan(value, 1 if value == "replicate" else apart, None, now.recompute)
        case "group":
            return replace(now, group_size=_integer("group_size", value), shares=None)
        case "shares":
            return replace(now, shares=shares_of(value))
        case _:
            return replace(now, recompute=value)


def _integer(name: str, value: Any) -> int:
    try:
        return int(str(value))
    except ValueError:
        raise PlanError(f"{name} must be a positive integer, got {value!r}") from None


def _counted(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{len(names)} layers"


def _value_text(value: Any) -> str:
    if isinstance(value, Own):
        return name_of(value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value) if str(value).strip() else "none"
