"""What a model is, and how it can be split: values only, without torch."""

from workbench.plan.choice import LayerPlan
from workbench.plan.codec import Codec
from workbench.plan.errors import ExperimentError, PlanError
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
from workbench.plan.placement import Partial, Replicate, Shard, apportion
from workbench.plan.plan import Plan

__all__ = [
    "CIFAR10",
    "SGD",
    "Adam",
    "AdamW",
    "Codec",
    "Digits",
    "Experiment",
    "ExperimentError",
    "Graph",
    "ImageFolder",
    "Layer",
    "LayerPlan",
    "LocalSGD",
    "ParameterServer",
    "Partial",
    "Pipelined",
    "Plan",
    "PlanError",
    "Replicate",
    "Shard",
    "Source",
    "Synchronous",
    "Synthetic",
    "Weight",
    "apportion",
]
