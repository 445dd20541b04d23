"""The controller's traffic while ranks train, for models with few and with many parameters."""

import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from workbench.bench.report import Cell
from workbench.client.cluster import Cluster
from workbench.client.run.run import Run
from workbench.model.tracing.trace import trace
from workbench.plan.experiment.experiment import SGD, Experiment, Synthetic
from workbench.plan.plans.plan import Plan
from workbench.store.record import Tally

INPUT_SHAPE = (3, 16, 16)
WIDTHS = (1280, 12_800, 166_400)  # 1 M, 10 M and 130 M parameters
QUICK_WIDTHS = (128, 1280)
WORLDS = (2, 4, 8)
STEPS = 20
ROUNDS = 5
START_S = 120.0


NOTES = (
    f"control bytes: of all messages of a run that the job server counted; per step: of those "
    f"after the first of {STEPS} steps, each rank's answer at the end among them.",
    "tensor_bytes_through_controller: what a wider model adds to the messages of its run, "
    "where that is as much as the smallest tensor that is wider; less is digits of its text.",
    "submit_to_first_step: seconds from the call of train to the end of the first step, on "
    "engines that have run the same before.",
)


@dataclass(frozen=True)
class Live:
    """The rows, and the samples of each figure."""

    rows: tuple[Mapping[str, Cell], ...]
    samples: Mapping[str, list[float]]


class Wide(nn.Module):
    """Two linear layers: the same model in text, whatever the number of parameters."""

    def __init__(self, width: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.hidden = nn.Linear(torch.Size(INPUT_SHAPE).numel(), width)
        self.out = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Maps images [rows, 3, 16, 16] to scores [rows, 10]."""
        return self.out(torch.relu(self.hidden(torch.flatten(x, 1))))


def measured(world: int, *, quick: bool) -> Live:
    """Trains models of one form and several widths, on so many ranks.

    The linear layers are sharded over all ranks, so that each holds a part of the parameters.
    """
    with (
        tempfile.TemporaryDirectory() as directory,
        Cluster(world, directory=directory, timeout=300.0) as cluster,
    ):
        rows = [_controlled(cluster, width) for width in (QUICK_WIDTHS if quick else WIDTHS)]
        starts = _started(cluster, 2 if quick else ROUNDS)
    samples = {
        "control_bytes_per_step": [float(row["bytes/step"]) for row in rows],
        "tensor_bytes_through_controller": [_tensor_bytes(rows[0], row) for row in rows[1:]],
        "submit_to_first_step": starts,
    }
    return Live(tuple(rows), samples)


def _controlled(cluster: Cluster, width: int) -> dict[str, Cell]:
    module = Wide(width)
    run = _run(cluster, module)
    _await_first_row(run)
    before = _all(cluster, run)
    run.wait(START_S)
    after = _all(cluster, run)
    return {
        "ranks": len(cluster),
        "width": width,
        "parameters": sum(each.numel() for each in module.parameters()),
        "messages": after.messages,
        "bytes": after.bytes,
        "messages/step": (after.messages - before.messages) / STEPS,
        "bytes/step": (after.bytes - before.bytes) / STEPS,
    }


def _tensor_bytes(narrow: Mapping[str, Cell], wide: Mapping[str, Cell]) -> float:
    """Bytes that a wider model adds, if they could hold its smallest tensor, the hidden bias."""
    added = float(wide["bytes"]) - float(narrow["bytes"])
    bias = 4 * (int(wide["width"]) - int(narrow["width"]))
    return added if added >= bias else 0.0


def _started(cluster: Cluster, rounds: int) -> list[float]:
    module, seconds = Wide(QUICK_WIDTHS[0]), []
    for number in range(rounds + 1):
        begun = time.time()
        run = _run(cluster, module)
        run.wait(START_S)
        if number:  # the first one warms what it uses
            seconds.append(min(row["time"] for row in run.rows if row["step"] == 0) - begun)
    return seconds


def _run(cluster: Cluster, module: Wide) -> Run:
    graph = trace(module, input_shape=INPUT_SHAPE)
    experiment = Experiment(
        plan=Plan.hybrid(graph, len(cluster)),
        data=Synthetic(samples=256),
        batch_size=32,
        optimizer=SGD(lr=0.01),
        steps=STEPS,
    )
    return cluster.train(experiment, module=module)


def _await_first_row(run: Run) -> None:
    deadline = time.monotonic() + START_S
    while not run.rows and not run.is_done:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{run!r} made no step in {START_S:g} s")
        time.sleep(0.01)


def _all(cluster: Cluster, run: Run) -> Tally:
    found = cluster.link.store.ledger(run.id).values()
    return Tally(sum(each.messages for each in found), sum(each.bytes for each in found))
