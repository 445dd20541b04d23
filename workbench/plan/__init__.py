"""What a model is, and how it can be split: values only, without torch."""

from workbench.plan.choice import LayerPlan
from workbench.plan.codec import Codec
from workbench.plan.device import Device
from workbench.plan.errors import ExperimentError, MachineError, PlanError
from workbench.plan.experience import Estimate
from workbench.plan.experiment import (
    CIFAR10,
    SGD,
    Adam,
    AdamW,
    Digits,
    Experiment,
    ImageFolder,
    LocalSGD,
    ParameterServer,
    Pipelined,
    Synchronous,
    Synthetic,
)
from workbench.plan.graph import Graph, Layer, Source, Weight
from workbench.plan.link import Curve, Link
from workbench.plan.machine import Machine
from workbench.plan.placement import Partial, Replicate, Shard, apportion
from workbench.plan.plan import Plan
from workbench.plan.sample import Sample
from workbench.plan.work import Work, work_of, works_of

__all__ = [
    "CIFAR10",
    "SGD",
    "Adam",
    "AdamW",
    "Codec",
    "Curve",
    "Device",
    "Digits",
    "Estimate",
    "Experiment",
    "ExperimentError",
    "Graph",
    "ImageFolder",
    "Layer",
    "LayerPlan",
    "Link",
    "LocalSGD",
    "Machine",
    "MachineError",
    "ParameterServer",
    "Partial",
    "Pipelined",
    "Plan",
    "PlanError",
    "Replicate",
    "Sample",
    "Shard",
    "Source",
    "Synchronous",
    "Synthetic",
    "Weight",
    "Work",
    "apportion",
    "work_of",
    "works_of",
]
