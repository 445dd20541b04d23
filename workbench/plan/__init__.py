"""Models, and the plans that split them over ranks: values only, without torch."""

from workbench.plan.errors import ExperimentError, MachineError, PlanError
from workbench.plan.experiment.codec import Codec
from workbench.plan.experiment.experiment import (
    ASGD,
    CIFAR10,
    SGD,
    Adadelta,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    CrossEntropy,
    Digits,
    Experiment,
    ImageFolder,
    LocalSGD,
    Loss,
    LossScale,
    LRScheduler,
    Metric,
    NAdam,
    OwnStrategy,
    ParameterGroup,
    ParameterServer,
    Pipelined,
    RAdam,
    RMSprop,
    Rprop,
    Synchronous,
    Synthetic,
    TorchData,
    WarmupCosine,
)
from workbench.plan.experiment.task import Text
from workbench.plan.graph import Graph, Layer, Source, Weight
from workbench.plan.inputs import Input
from workbench.plan.machine.device import Device
from workbench.plan.machine.experience import Estimate, Sample
from workbench.plan.machine.link import Curve, Link
from workbench.plan.machine.machine import Machine
from workbench.plan.machine.work import Work, work_of, works_of
from workbench.plan.placement.choice import LayerPlan
from workbench.plan.placement.placement import Partial, Replicate, Shard, apportion
from workbench.plan.plan import Plan
from workbench.plan.stability import Curvature

__all__ = [
    "ASGD",
    "CIFAR10",
    "SGD",
    "Adadelta",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "Codec",
    "CrossEntropy",
    "Curvature",
    "Curve",
    "Device",
    "Digits",
    "Estimate",
    "Experiment",
    "ExperimentError",
    "Graph",
    "ImageFolder",
    "Input",
    "LRScheduler",
    "Layer",
    "LayerPlan",
    "Link",
    "LocalSGD",
    "Loss",
    "LossScale",
    "Machine",
    "MachineError",
    "Metric",
    "NAdam",
    "OwnStrategy",
    "ParameterGroup",
    "ParameterServer",
    "Partial",
    "Pipelined",
    "Plan",
    "PlanError",
    "RAdam",
    "RMSprop",
    "Replicate",
    "Rprop",
    "Sample",
    "Shard",
    "Source",
    "Synchronous",
    "Synthetic",
    "Text",
    "TorchData",
    "WarmupCosine",
    "Weight",
    "Work",
    "apportion",
    "work_of",
    "works_of",
]
