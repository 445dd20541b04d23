"""Shares for devices of unequal speed, from measured times: functional performance models."""

from workbench.predict.balance.online import Balancer
from workbench.predict.balance.partition import Partition, partition
from workbench.predict.balance.plans import Balanced, balanced
from workbench.predict.balance.time_model import Kind, Point, TimeModel

__all__ = [
    "Balanced",
    "Balancer",
    "Kind",
    "Partition",
    "Point",
    "TimeModel",
    "balanced",
    "partition",
]
