"""Shares for devices of unequal speed, from measured times: functional performance models."""

from workbench.predict.balance.online import Balancer
from workbench.predict.balance.plans import Balanced, balanced
from workbench.predict.balance.sharing import UNITS, Split
from workbench.predict.balance.time_model import Partition, Point, TimeModel, partition

__all__ = [
    "UNITS",
    "Balanced",
    "Balancer",
    "Partition",
    "Point",
    "Split",
    "TimeModel",
    "balanced",
    "partition",
]
