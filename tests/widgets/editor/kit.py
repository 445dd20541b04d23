"""Editors whose messages are kept, graphs, engines and runs to edit plans for."""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import workbench as wb
from tests.plan.graphs import Builder
from workbench.plan.experiment.question import usual
from workbench.plan.graph.graph import Graph
from workbench.widgets.editor.state import Snapshot

MACHINE = wb.Machine.preset("h100-nvlink")


def residual(blocks: int, *, channels: int = 8) -> Graph:
    """A stem, `blocks` equal blocks of two convolutions, norms and a sum, and a head."""
    builder = Builder((3, 8, 8)).conv("stem", channels).same("relu", "elementwise")
    for block in range(blocks):
        entry, name = builder.last, f"stage.{block}"
        builder.conv(f"{name}.conv1", channels).norm(f"{name}.bn1")
        builder.same(f"{name}.relu", "elementwise").conv(f"{name}.conv2", channels)
        builder.norm(f"{name}.bn2").same(f"add_{block}", "add", f"{name}.bn2", entry)
    builder.add("pool", "pool", (channels, 1, 1)).add("flatten", "flatten", (channels,))
    return builder.linear("head", 10).graph()


def patched(old: Snapshot, patch: Mapping[str, Any]) -> Snapshot:
    """What a view makes of a patch, as `store.js` does."""
    columns = {name: list(column) for name, column in old.columns.items()}
    for name, (at, values) in patch.get("columns", {}).items():
        column = columns.setdefault(name, [])
        column.extend([None] * (max(at, default=-1) + 1 - len(column)))
        for index, value in zip(at, values, strict=True):
            column[index] = value
    return Snapshot(columns, {**old.values, **patch.get("values", {})})


class Seen:
    """What a view has been told, put together as the view does."""

    def __init__(self, editor: wb.PlanEditor) -> None:
        self.messages: list[dict] = []
        self.state: Snapshot | None = None
        editor.send = self.take
        editor._handle_custom_msg({"type": "hello"}, [])
        self.messages.clear()

    def begin(self, state: dict) -> None:
        self.state, self.version = Snapshot(state["columns"], state["values"]), state["version"]

    def take(self, content: dict, buffers: object = ()) -> None:
        if content["type"] == "heard":
            return
        self.messages.append(content)
        if content["type"] == "state":
            self.begin(content["state"])
            return
        if self.state is None:
            return
        assert content["version"] == self.version + 1
        self.state, self.version = patched(self.state, content), content["version"]


def searched(plan: wb.Plan, machine: wb.Machine, _: object, *, memory_limit: str | None):
    """What a search comes to, in no time: two plans, or with a limit one that does not fit."""
    graph, world_size = plan.graph, plan.world_size
    plans = [wb.Plan.hybrid(graph, world_size), wb.Plan.data_parallel(graph, world_size)]
    found = [wb.predict(plan, machine, usual(plan)) for plan in plans]
    if memory_limit is not None:
        needed = found[0].memory.peak_bytes
        raise wb.MemoryLimitError(f"needs {needed:,} bytes", plans[0], needed, needed)
    pareto = [
        SimpleNamespace(plan=plan, step_time=one.step_time, peak_bytes=one.memory.peak_bytes)
        for plan, one in zip(plans, found, strict=True)
    ]
    return SimpleNamespace(pareto=pareto, gap=0.0, judged=2, seconds=0.1, memory_limit=2**30)


class FakeCluster:
    """Verifies whatever it is given; `error` is raised instead where there is one."""

    def __init__(self, n: int = 4, error: Exception | None = None) -> None:
        self.devices = (SimpleNamespace(memory_bytes=2**30),) * n
        self.error, self.verified = error, []

    def __len__(self) -> int:
        return len(self.devices)

    def verify(self, plan: wb.Plan, **options: object) -> object:
        self.verified.append((plan, options))
        if self.error:
            raise self.error
        worst = SimpleNamespace(what="gradient", name="fc0.weight", rank=1, error=3e-16)
        return SimpleNamespace(
            exact=True,
            worst=worst,
            differences=(worst,),
            precision="fp64",
            tolerance=lambda _: 1e-10,
        )

    def calibrate(self, *what: object, **options: object) -> wb.Machine:
        return MACHINE


class FakeRun:
    """Goes on under whatever plan it is given."""

    def __init__(self, experiment: wb.Experiment) -> None:
        self.experiment, self.plans = experiment, []

    def replan(self, plan: wb.Plan, machine: object = None) -> object:
        self.plans.append(plan)
        cost = SimpleNamespace(received_bytes=(2_000_000, 0))
        return SimpleNamespace(cost=cost, wait=lambda: None)
