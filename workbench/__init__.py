"""A research workbench for hybrid-parallel deep learning.

Names are loaded when they are first used: a process that handles plans only never imports torch.
"""

import sys
from importlib import import_module
from importlib.abc import MetaPathFinder
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from workbench import extend as extend
    from workbench.client import CheckedExtension as CheckedExtension
    from workbench.client import Cluster as Cluster
    from workbench.client import Environment as Environment
    from workbench.client import Jobs as Jobs
    from workbench.client import JSONLines as JSONLines
    from workbench.client import Ranks as Ranks
    from workbench.client import Rebalancer as Rebalancer
    from workbench.client import Replan as Replan
    from workbench.client import Run as Run
    from workbench.client import RunComparison as RunComparison
    from workbench.client import TensorBoard as TensorBoard
    from workbench.client import WandB as WandB
    from workbench.client import check_extension as check_extension
    from workbench.client import compare_runs as compare_runs
    from workbench.client import export_checkpoint as export_checkpoint
    from workbench.client import runs as runs
    from workbench.comm import CommError as CommError
    from workbench.hosts import Hosts as Hosts
    from workbench.model import CheckpointError as CheckpointError
    from workbench.model import ModelError as ModelError
    from workbench.model import TraceError as TraceError
    from workbench.model import trace as trace
    from workbench.model.export import to_dtensor as to_dtensor
    from workbench.model.export import to_fsdp as to_fsdp
    from workbench.model.weights.exchange import read_weights as read_weights
    from workbench.plan import ASGD as ASGD
    from workbench.plan import CIFAR10 as CIFAR10
    from workbench.plan import SGD as SGD
    from workbench.plan import Adadelta as Adadelta
    from workbench.plan import Adagrad as Adagrad
    from workbench.plan import Adam as Adam
    from workbench.plan import Adamax as Adamax
    from workbench.plan import AdamW as AdamW
    from workbench.plan import Codec as Codec
    from workbench.plan import CrossEntropy as CrossEntropy
    from workbench.plan import Device as Device
    from workbench.plan import Digits as Digits
    from workbench.plan import Experiment as Experiment
    from workbench.plan import ExperimentError as ExperimentError
    from workbench.plan import Graph as Graph
    from workbench.plan import ImageFolder as ImageFolder
    from workbench.plan import Input as Input
    from workbench.plan import Layer as Layer
    from workbench.plan import LayerPlan as LayerPlan
    from workbench.plan import Link as Link
    from workbench.plan import LocalSGD as LocalSGD
    from workbench.plan import Loss as Loss
    from workbench.plan import LossScale as LossScale
    from workbench.plan import LRScheduler as LRScheduler
    from workbench.plan import Machine as Machine
    from workbench.plan import MachineError as MachineError
    from workbench.plan import Metric as Metric
    from workbench.plan import NAdam as NAdam
    from workbench.plan import OwnStrategy as OwnStrategy
    from workbench.plan import ParameterGroup as ParameterGroup
    from workbench.plan import ParameterServer as ParameterServer
    from workbench.plan import Partial as Partial
    from workbench.plan import Pipelined as Pipelined
    from workbench.plan import Plan as Plan
    from workbench.plan import PlanError as PlanError
    from workbench.plan import RAdam as RAdam
    from workbench.plan import Replicate as Replicate
    from workbench.plan import RMSprop as RMSprop
    from workbench.plan import Rprop as Rprop
    from workbench.plan import Shard as Shard
    from workbench.plan import Synchronous as Synchronous
    from workbench.plan import Synthetic as Synthetic
    from workbench.plan import Text as Text
    from workbench.plan import TorchData as TorchData
    from workbench.plan import WarmupCosine as WarmupCosine
    from workbench.plan import apportion as apportion
    from workbench.plan.extension.user_object import OwnObjectError as OwnObjectError
    from workbench.predict import Balanced as Balanced
    from workbench.predict import Compute as Compute
    from workbench.predict import Memory as Memory
    from workbench.predict import Network as Network
    from workbench.predict import Prediction as Prediction
    from workbench.predict import TimingModel as TimingModel
    from workbench.predict import Traffic as Traffic
    from workbench.predict import balanced as balanced
    from workbench.predict import predict as predict
    from workbench.predict.compare import Comparison as Comparison
    from workbench.predict.measured import Timeline as Timeline
    from workbench.predict.search import MemoryLimitError as MemoryLimitError
    from workbench.predict.search import SearchResult as SearchResult
    from workbench.predict.search import search as search
    from workbench.program import Program as Program
    from workbench.program import program as program
    from workbench.store import ClusterError as ClusterError
    from workbench.store import ControlMessageTooLarge as ControlMessageTooLarge
    from workbench.store import Diverged as Diverged
    from workbench.store import EngineDied as EngineDied
    from workbench.store import HostsError as HostsError
    from workbench.store import Profile as Profile
    from workbench.store import RankError as RankError
    from workbench.store import RunError as RunError
    from workbench.store import StoreError as StoreError
    from workbench.train.data.reading import DataError as DataError
    from workbench.train.verify.verification import Verification as Verification
    from workbench.widgets import AccuracyChart as AccuracyChart
    from workbench.widgets import ClusterView as ClusterView
    from workbench.widgets import Dashboard as Dashboard
    from workbench.widgets import JobTable as JobTable
    from workbench.widgets import MemoryMap as MemoryMap
    from workbench.widgets import PlanEditor as PlanEditor
    from workbench.widgets import ScalingExplorer as ScalingExplorer
    from workbench.widgets import StalenessExplorer as StalenessExplorer
    from workbench.widgets import TimingChart as TimingChart
    from workbench.widgets import TimingExplorer as TimingExplorer
    from workbench.widgets import TrafficMatrix as TrafficMatrix

_HOME = {
    name: home
    for home, names in {
        "client": (
            "CheckedExtension Cluster Environment JSONLines Jobs Ranks "
            "Rebalancer Replan Run RunComparison TensorBoard WandB check_extension "
            "compare_runs export_checkpoint runs"
        ),
        "comm": "CommError",
        "hosts": "Hosts",
        "model.export": "to_dtensor to_fsdp",
        "model": "CheckpointError ModelError TraceError trace",
        "model.weights.exchange": "read_weights",
        "plan": (
            "ASGD CIFAR10 SGD Adadelta Adagrad Adam AdamW Adamax Codec CrossEntropy "
            "Device Digits Experiment apportion ExperimentError Graph ImageFolder Input Layer "
            "LayerPlan Link LocalSGD Loss LossScale LRScheduler Machine MachineError Metric "
            "NAdam OwnStrategy ParameterGroup ParameterServer Partial Pipelined Plan "
            "PlanError RAdam Replicate RMSprop Rprop Shard Synchronous Synthetic Text "
            "TorchData WarmupCosine"
        ),
        "plan.extension.user_object": "OwnObjectError",
        "predict": (
            "Balanced Compute Memory Network Prediction TimingModel Traffic balanced predict"
        ),
        "predict.compare": "Comparison",
        "predict.measured": "Timeline",
        "predict.search": "MemoryLimitError SearchResult search",
        "store": (
            "ClusterError ControlMessageTooLarge Diverged EngineDied HostsError Profile RankError "
            "RunError StoreError"
        ),
        "program": "Program program",
        "train.data.reading": "DataError",
        "train.verify.verification": "Verification",
        "widgets": (
            "AccuracyChart ClusterView Dashboard JobTable MemoryMap PlanEditor ScalingExplorer "
            "StalenessExplorer TimingChart TimingExplorer TrafficMatrix"
        ),
    }.items()
    for name in names.split()
}

__all__ = sorted([*_HOME, "extend"])
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name == "extend":
        return import_module("workbench.extend")
    try:
        home = _HOME[name]
    except KeyError:
        raise AttributeError(f"module 'workbench' has no attribute {name!r}") from None
    value = getattr(import_module(f"workbench.{home}"), name)
    if name == "Machine":  # which measures by rooms that plan may not import
        value._measure = _measure
    return value


def _measure(*arguments: Any) -> Any:
    return import_module("workbench.client.calibration.calibrate").local_machine(*arguments)


def load_ipython_extension(shell: Any) -> None:
    """What `%load_ext workbench` calls: `%wb status`, `%%ranks`."""
    import_module("workbench.magics").register(shell)


def __dir__() -> list[str]:
    return [*__all__, "__version__", "load_ipython_extension"]


class _Facade(ModuleType):
    """Keeps `predict` and `program` functions, also once folders of these names are imported."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled by its name, as all modules: what people write in a cell refers to it."""
        return import_module, (self.__name__,)

    def __setattr__(self, name: str, value: object) -> None:
        """Python puts every folder that it has imported here; `sys.modules` has it, too."""
        if name not in _HOME or not isinstance(value, ModuleType):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Facade


class _BeforeTorchvision(MetaPathFinder):
    """Has `import torchvision` work wherever the workbench does (`model/vision.py`).

    In a cell, on an engine, and in a package such as timm: once, as it is first imported.
    """

    def find_spec(self, fullname: str, *_: Any) -> None:
        """Finds nothing: who comes next does."""
        if fullname == "torchvision":
            sys.meta_path.remove(self)
            import_module("workbench.model.vision").declare_operators()


if "torchvision" not in sys.modules:
    sys.meta_path.insert(0, _BeforeTorchvision())
