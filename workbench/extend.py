"""What the workbench is extended with: the base classes of a person's own ideas.

    Algorithm    an all-reduce: rounds of messages (`MessageRound`)
    Codec        what travels instead of values: encode, decode, bytes
    Scheme       how the ranks of a group divide a layer
    Strategy     when gradients are summed and used, or weights averaged
    Rule         a plan for any model, in the editor's menu

An object of a class that extends one of them is given where the name of a built-in one is, which
extends the same class. `wb.check_extension` checks it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from workbench.comm.algorithms.algorithm import Algorithm as Algorithm
    from workbench.comm.codecs.coding import PieceCoding as PieceCoding
    from workbench.comm.messages.flat import MessageRound as MessageRound
    from workbench.plan.experiment.sync import Strategy as Strategy
    from workbench.plan.placement.placement import Partial as Partial
    from workbench.plan.placement.placement import Replicate as Replicate
    from workbench.plan.placement.placement import Shard as Shard
    from workbench.plan.placement.schemes import Division as Division
    from workbench.plan.placement.schemes import Scheme as Scheme
    from workbench.plan.placement.schemes import held_by as held_by
    from workbench.plan.plans.rule import GroupRule as GroupRule
    from workbench.plan.plans.rule import Rule as Rule

_HOME = {
    "Algorithm": "comm.algorithms.algorithm:Algorithm",
    "Codec": "comm.codecs.coders:Coder",
    "Division": "plan.placement.schemes:Division",
    "GroupRule": "plan.plans.rule:GroupRule",
    "MessageRound": "comm.messages.flat:MessageRound",
    "Partial": "plan.placement.placement:Partial",
    "PieceCoding": "comm.codecs.coding:PieceCoding",
    "Replicate": "plan.placement.placement:Replicate",
    "Rule": "plan.plans.rule:Rule",
    "Scheme": "plan.placement.schemes:Scheme",
    "Shard": "plan.placement.placement:Shard",
    "Strategy": "plan.experiment.sync:Strategy",
    "held_by": "plan.placement.schemes:held_by",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    try:
        module, _, attribute = _HOME[name].partition(":")
    except KeyError:
        raise AttributeError(f"module 'workbench.extend' has no attribute {name!r}") from None
    return getattr(import_module(f"workbench.{module}"), attribute)


def __dir__() -> list[str]:
    return list(__all__)
