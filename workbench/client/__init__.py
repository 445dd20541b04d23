"""What a notebook holds: clusters, runs, jobs.

Names are loaded when they are first used: whoever only looks at jobs imports no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from workbench.client.calibration.rebalancer import Rebalancer as Rebalancer
    from workbench.client.checks.extension import CheckedExtension as CheckedExtension
    from workbench.client.checks.extension import check_extension as check_extension
    from workbench.client.cluster import Cluster as Cluster
    from workbench.client.jobs import Jobs as Jobs
    from workbench.client.loggers.files import JSONLines as JSONLines
    from workbench.client.loggers.files import TensorBoard as TensorBoard
    from workbench.client.loggers.files import WandB as WandB
    from workbench.client.ranks import Ranks as Ranks
    from workbench.client.records.comparison import RunComparison as RunComparison
    from workbench.client.records.comparison import compare_runs as compare_runs
    from workbench.client.records.environment import Environment as Environment
    from workbench.client.records.export import export_checkpoint as export_checkpoint
    from workbench.client.records.runs import runs as runs
    from workbench.client.run.requests import Replan as Replan
    from workbench.client.run.run import Run as Run

_HOME = {
    "CheckedExtension": "checks.extension",
    "Cluster": "cluster",
    "Environment": "records.environment",
    "JSONLines": "loggers.files",
    "Jobs": "jobs",
    "Ranks": "ranks",
    "Rebalancer": "calibration.rebalancer",
    "Replan": "run.requests",
    "Run": "run.run",
    "RunComparison": "records.comparison",
    "TensorBoard": "loggers.files",
    "WandB": "loggers.files",
    "check_extension": "checks.extension",
    "compare_runs": "records.comparison",
    "export_checkpoint": "records.export",
    "runs": "records.runs",
}


def __getattr__(name: str) -> Any:
    try:
        home = _HOME[name]
    except KeyError:
        raise AttributeError(f"module 'workbench.client' has no attribute {name!r}") from None
    return getattr(import_module(f"workbench.client.{home}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
