"""A research workbench for hybrid-parallel deep learning.

Names are loaded when they are first used: a process that handles plans only never imports torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from workbench.cluster import Cluster, Run
    from workbench.model import trace
    from workbench.plan import (
        CIFAR10,
        SGD,
        Adam,
        AdamW,
        Digits,
        Experiment,
        ExperimentError,
        Graph,
        ImageFolder,
        LayerPlan,
        Partial,
        Plan,
        PlanError,
        Replicate,
        Shard,
        Synchronous,
        Synthetic,
        apportion,
    )
    from workbench.widgets import Dashboard

_HOME = {
    "Cluster": "cluster",
    "Run": "cluster",
    "trace": "model",
    "Dashboard": "widgets",
    **dict.fromkeys(
        (
            "CIFAR10",
            "SGD",
            "Adam",
            "AdamW",
            "Digits",
            "Experiment",
            "ExperimentError",
            "Graph",
            "ImageFolder",
            "LayerPlan",
            "Partial",
            "Plan",
            "PlanError",
            "Replicate",
            "Shard",
            "Synchronous",
            "Synthetic",
            "apportion",
        ),
        "plan",
    ),
}

__version__ = "0.1.0"
__all__ = [*_HOME]


def __getattr__(name: str) -> Any:
    try:
        home = _HOME[name]
    except KeyError:
        raise AttributeError(f"module 'workbench' has no attribute {name!r}") from None
    return getattr(import_module(f"workbench.{home}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
