"""The allocator says what convolutions take, each instruction set something else."""

import json
import os
import platform
import subprocess
import sys
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

from workbench.model.tracing.trace import trace
from workbench.plan.machine.work import Needed, takes_workspace, work_of
from workbench.plan.plans.plan import Plan
from workbench.train.measure.device import workspaces_of

CPU = torch.device("cpu")

# A convolution whose filter is larger than its images; the peak of its weight's gradient.
PEAK = """
import json, torch
from torch import nn
torch.set_num_threads(1)
import workbench as wb
from workbench.train.measure.device import workspaces_of
graph = wb.trace(nn.Sequential(nn.Conv2d(64, 64, 3, padding=1)), input_shape=(64, 2, 2))
(found,) = workspaces_of(wb.Plan.data_parallel(graph, 1), [0], [8], "fp32", torch.device("cpu"))
print(json.dumps(found.points[-1]))
"""


def net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.Conv2d(16, 16, 3, padding="same", groups=4, bias=False),
        nn.Conv2d(16, 32, 3, stride=2, padding=1, padding_mode="reflect"),
        nn.Conv2d(32, 32, 1),
        nn.Flatten(),
        nn.Linear(32 * 16, 10),
    )


GRAPH = trace(net(), input_shape=(3, 8, 8))
CONVOLUTIONS = [layer for layer in GRAPH.layers if layer.kind == "conv2d"]


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp64"])
def test_every_distinct_convolution_is_measured_at_all_powers_of_two(precision):
    plan = Plan.data_parallel(GRAPH, 2)
    found = workspaces_of(plan, [0, 1], [3, 5], precision, CPU)
    assert [one.precision for one in found] == [precision] * len(CONVOLUTIONS)
    assert {tuple(rows for rows, *_ in one.points) for one in found} == {(1, 2, 3, 4, 5)}
    assert found == workspaces_of(plan, [0], [3, 5], precision, CPU)


def test_pieces_are_measured_as_each_rank_has_them():
    plan = Plan.data_parallel(GRAPH, 2).with_layer(
        "3", scheme="shard_out", group_size=2, shares=(3, 1)
    )
    works = [work_of(plan, GRAPH["3"], rank, (4, 4), "fp32") for rank in range(2)]
    found = {one.key: one for one in workspaces_of(plan, [0, 1], [4], "fp32", CPU)}
    assert works[0].key != works[1].key
    assert all(found[work.key].at(8) is not None for work in works), "the rows of the group"


def test_a_rank_without_filters_takes_nothing():
    plan = Plan.data_parallel(GRAPH, 2).with_layer(
        "3", scheme="shard_out", group_size=2, shares=(1, 0)
    )
    found = {one.key: one for one in workspaces_of(plan, [1], [4], "fp32", CPU)}
    work = work_of(plan, GRAPH["3"], 1, (4, 4), "fp32")
    assert found[work.key].at(8) == (0, 0, 0)


class Innermost(nn.Module):
    """A convolution of images that were made with their channels innermost."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(64, 64)
        self.depthwise = nn.Conv2d(64, 64, 7, padding=3, groups=64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.depthwise(self.mix(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2))


def test_channels_lie_as_the_model_has_them():
    plain = nn.Sequential(nn.Conv2d(64, 64, 7, padding=3, groups=64))
    found = [
        workspaces_of(
            Plan.data_parallel(trace(module, input_shape=(64, 4, 4)), 1), [0], [8], "fp32", CPU
        )
        for module in (plain, Innermost())
    ]
    assert found[0][0].key == found[1][0].key
    assert found[0] != found[1]


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="oneDNN's for x86")
def test_instruction_sets_take_different_workspaces():
    taken = [peak(instructions) for instructions in ("SSE41", "AVX2")]
    assert taken[0] != taken[1]


def peak(instructions: str) -> list[int]:
    run = partial(subprocess.run, capture_output=True, text=True, check=True)
    done = run([sys.executable, "-c", PEAK], env={**os.environ, "ONEDNN_MAX_CPU_ISA": instructions})
    return json.loads(done.stdout)


def test_linear_layers_with_a_bias_are_measured_on_gpus_alone(monkeypatch):
    """As each rank has them, of the rows that its group has; here on the CPU, which needs none."""
    plan = Plan.data_parallel(GRAPH, 2).with_layer(
        "5", scheme="shard_in", group_size=2, shares=(1, 0)
    )
    linear, bare = GRAPH["5"], replace(GRAPH["5"], weights=GRAPH["5"].weights[:1])
    assert [takes_workspace(linear, kind) for kind in ("cpu", "cuda")] == [False, True]
    assert not takes_workspace(bare, "cuda"), "its gradient is a product of matrices"
    shapes = []

    def needed(module, x):
        if isinstance(module, nn.Linear):
            shapes.append((module.in_features, module.out_features, tuple(x.shape)))
        return Needed(0, 0, len(shapes))

    room = "workbench.train.measure.device"
    monkeypatch.setattr(f"{room}.takes_workspace", lambda layer, _: takes_workspace(layer, "cuda"))
    monkeypatch.setattr(f"{room}._needed", needed)
    found = {one.key: one for one in workspaces_of(plan, [0, 1], [4], "fp32", CPU)}
    works = [work_of(plan, linear, rank, (4, 4), "fp32") for rank in range(2)]
    assert shapes == [(512, 10, (rows, 512)) for rows in (1, 2, 4, 8)]
    assert [found[work.key].at(8) for work in works] == [(0, 0, 4), (0, 0, 0)]
