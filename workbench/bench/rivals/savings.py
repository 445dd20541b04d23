"""The parameters that a rank saves when linear layers are sharded: from plans, without a run.

A rank of a group of k holds all P_conv parameters of the convolutions and a k-th of the P_FC of the
linear layers, so that it saves P_FC / P (1 - 1/k) (SplitBrain, arXiv:2112.15317); where a layer's
outputs are no multiple of k, the rank that holds most counts.
"""

from collections.abc import Iterator

import torch
from torch import nn

from workbench.bench.nets import INPUT_SHAPE, SmallVGG
from workbench.bench.report import Cell, Figure
from workbench.model.tracing.trace import trace
from workbench.model.vision import torchvision
from workbench.plan.graph.graph import Graph
from workbench.plan.plans.plan import Plan

GROUP_SIZES = (2, 4, 8, 16, 32)
MIB = 2**20
REPRODUCTION = "small VGG"
PARAMETER_BYTES = 4


def savings(*, quick: bool) -> list[dict[str, Cell]]:
    """A row for every model, sharding and group size; `quick`: of the small VGG alone."""
    rows = []
    for name, graph in _graphs(quick):
        linear = [layer.name for layer in graph.layers if layer.kind == "linear"]
        cuts = {"all": linear}
        if name == REPRODUCTION:
            cuts["all but the last"] = linear[:-1]
        for cut, layers in cuts.items():
            rows += [_row(name, graph, cut, layers, k) for k in GROUP_SIZES]
    return rows


def figures_of(rows: list[dict[str, Cell]]) -> dict[str, Figure]:
    """The savings of the small VGG, in percent, by group size; all linear layers sharded."""
    found = {}
    for row in rows:
        if row["model"] == REPRODUCTION and row["linear layers cut"] == "all":
            saved = float(row["saved %"])
            found[f"parameters_saved_k{row['group']}"] = Figure(saved, saved, saved)
    return found


def _row(name: str, graph: Graph, cut: str, layers: list[str], k: int) -> dict[str, Cell]:
    plan = Plan.data_parallel(graph, k)
    for layer in layers:
        plan = plan.with_layer(layer, scheme="shard_out", group_size=k)
    held = max(map(plan.parameters_of, range(k)))
    return {
        "model": name,
        "linear layers cut": cut,
        "group": k,
        "parameter MiB per rank": held * PARAMETER_BYTES / MIB,
        "saved %": 100 * (1 - held / graph.parameters),
    }


def _graphs(quick: bool) -> Iterator[tuple[str, Graph]]:
    yield REPRODUCTION, trace(SmallVGG(), input_shape=INPUT_SHAPE)
    if quick:
        return
    yield "small VGG, half width", trace(SmallVGG(width=32), input_shape=INPUT_SHAPE)
    yield "VGG-11, head of 4096", trace(_vgg11_with_head(4096), input_shape=INPUT_SHAPE)
    yield "VGG-11, head of 512", trace(_vgg11_with_head(512), input_shape=INPUT_SHAPE)
    for name in ("vgg11", "vgg16"):
        for classes in (1000, 10):
            graph = trace(name, input_shape=INPUT_SHAPE, num_classes=classes)
            yield f"{name}, {classes} classes", graph


def _vgg11_with_head(hidden: int) -> nn.Module:
    """VGG-11 for images of 32 x 32: its features are 512 numbers, and need no pool."""
    with torch.device("meta"):
        features = torchvision().models.vgg11(num_classes=10).features
    head = [nn.Linear(512, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU()]
    return nn.Sequential(features, nn.Flatten(), *head, nn.Linear(hidden, 10))
