"""What an editor's buttons do beside edits: suggest, take, verify, measure, apply, save, load."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.plan.plan import Plan
from workbench.predict.search import MemoryLimitError, SearchResult, search
from workbench.predict.search.limit import bytes_of
from workbench.predict.search.result import summary
from workbench.widgets.editor.target import Target

if TYPE_CHECKING:
    from workbench.widgets.editor.editor import PlanEditor

NAMES = ("suggest", "take", "verify", "measure", "apply", "save", "load")

ADVICE = {
    "suggest": "Raise the memory limit, or take more ranks; the plan is as it was.",
    "verify": "print(editor.cluster) shows whether its engines are there; the plan is as it was.",
    "measure": "print(editor.cluster) shows whether its engines are there and free.",
    "apply": "The run goes on as it was, if it has not ended.",
    "load": "The plan is as it was.",
    "save": "Nothing was written.",
}
"""What to do about a service that failed."""

Content = Mapping[str, Any]

_NO_MACHINE = (
    "time needs a machine: wb.PlanEditor(plan, wb.Machine.preset('h100-nvlink')), or "
    "editor.machine = cluster.calibrate()"
)
_NO_CLUSTER = "needs engines: wb.PlanEditor(plan, wb.Cluster(4)), or editor.cluster = cluster"
_NO_RUN = "needs a run: wb.PlanEditor(plan, run), or editor.run = cluster.train(experiment)"


def possible(target: Target) -> dict[str, str]:
    """For each service "" where it can be had, or what it needs."""
    return {
        "suggest": "" if target.machine is not None else _NO_MACHINE,
        "verify": "" if target.cluster is not None else _NO_CLUSTER,
        "measure": "" if target.cluster is not None else _NO_CLUSTER,
        "apply": "" if target.run is not None else _NO_RUN,
    }


def suggest(editor: "PlanEditor", content: Content) -> None:
    """Searches the fastest plan that fits, and those that need less memory."""
    plan, machine, experiment = editor.plan, editor.machine, editor.experiment
    limit = str(content.get("limit") or "").strip() or None

    def work() -> dict[str, Any]:
        if machine is None:
            raise ValueError(_NO_MACHINE)
        try:
            found = search(plan.graph, machine, plan.world_size, limit, experiment=experiment)
        except MemoryLimitError as error:
            editor._suggested = (error.plan,)
            return {
                "text": f"{error}",
                "points": [{"step_s": None, "peak": error.needed, "plan": summary(error.plan)}],
                "limit": None if limit is None else bytes_of(limit),
            }
        return _told(editor, found)

    editor._errands.start("suggest", work, f"Searching plans for {plan.world_size} ranks …")


def _told(editor: "PlanEditor", found: SearchResult) -> dict[str, Any]:
    editor._suggested = tuple(one.plan for one in found.pareto)
    points = [
        {"step_s": one.step_time, "peak": one.peak_bytes, "plan": summary(one.plan)}
        for one in found.pareto
    ]
    best = "proven to be the best" if not found.gap else f"at most {found.gap:.1%} above the best"
    text = f"{found.judged} plans predicted in {found.seconds:.1f} s; the fastest is {best}."
    return {"text": text, "points": points, "limit": found.memory_limit}


def take(editor: "PlanEditor", content: Content) -> None:
    """Goes on with a plan that was suggested."""
    plan = editor._suggested[content["index"]]
    editor.go_on(plan, f"suggested: {summary(plan)}")


def verify(editor: "PlanEditor", content: Content) -> None:
    """Holds the split model against the unsplit one on the cluster."""
    plan, cluster, module = editor.plan, editor.cluster, editor.module

    def work() -> dict[str, Any]:
        if cluster is None:
            raise ValueError(f"verify {_NO_CLUSTER}")
        found = cluster.verify(plan, **({} if module is None else {"module": module}))
        worst = found.worst
        verdict = "Exact" if found.exact else "NOT exact"
        return {
            "good": bool(found.exact),
            "text": f"{verdict}: {len(found.differences)} tensors of {found.precision}, the worst "
            f"{worst.what} of {worst.name} on rank {worst.rank} is off by {worst.error:.1e} "
            f"(tolerance {found.tolerance(worst.what):.0e}).",
        }

    editor._errands.start("verify", work, "The split model runs against the unsplit one …")


def measure(editor: "PlanEditor", content: Content) -> None:
    """Calibrates the cluster for this model, so that time can be predicted."""
    graph, cluster, module = editor.plan.graph, editor.cluster, editor.module

    def work() -> dict[str, Any]:
        if cluster is None:
            raise ValueError(f"measure {_NO_CLUSTER}")
        options = {} if module is None else {"module": module}
        machine = cluster.calibrate(graph, **options)
        editor.machine = machine
        return {"text": f"Measured: {machine.name}."}

    editor._errands.start("measure", work, "Engines measure layers and links; about a minute …")


def apply(editor: "PlanEditor", content: Content) -> None:
    """Has the run go on under the plan after its current step."""
    plan, run, machine = editor.plan, editor.run, editor.machine

    def work() -> dict[str, Any]:
        if run is None:
            raise ValueError(f"apply {_NO_RUN}")
        wished = run.replan(plan, machine)
        moved = max(wished.cost.received_bytes) / 1e6
        wished.wait()
        return {"good": True, "text": f"The run goes on under this plan; {moved:,.1f} MB at most "
                "came to a rank."}  # fmt: skip

    editor._errands.start("apply", work, "The run changes its plan after the current step …")


def save(editor: "PlanEditor", content: Content) -> None:
    """Writes the plan as TOML."""
    plan, path = editor.plan, _path(content)

    def work() -> dict[str, Any]:
        plan.save(_named(path))
        return {"text": f"Saved {Path(path).resolve()}."}

    editor._errands.at_once("save", work)


def load(editor: "PlanEditor", content: Content) -> None:
    """Goes on with a plan that was saved, of this model."""
    path = _path(content)

    def work() -> dict[str, Any]:
        found = Plan.load(_named(path), editor.plan.graph)
        editor.go_on(found, f"loaded {Path(path).name}")
        return {"text": f"Loaded {Path(path).resolve()}."}

    editor._errands.at_once("load", work)


def _path(content: Content) -> str:
    return str(content.get("path") or "").strip()


def _named(path: str) -> Path:
    if not path:
        raise ValueError("no file was named; write a path such as plan.toml")
    return Path(path).expanduser()
