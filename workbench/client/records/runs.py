"""All runs below a folder, one line for each: read from their folders, without any cluster.

An experiment becomes fields with names, and of several the fields in which they differ: for tables.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.client.records.environment import Environment
from workbench.plan.experiment.experiment import Experiment
from workbench.plan.experiment.metrics import COLUMNS, Row
from workbench.plan.io.errors import ExperimentError, PlanError
from workbench.plan.io.value import Value
from workbench.plan.plans.plan import Plan
from workbench.store.errors import ClusterError
from workbench.store.rank_files import RankFiles
from workbench.store.record import RUN_STATES
from workbench.store.run_folder import EXPERIMENT, METRICS, RunOutcome, attempts, last_evaluation
from workbench.store.telemetry import newest, unpack_rows

if TYPE_CHECKING:
    import pandas

_FIRST = ("name", "state", "steps", "loss", "accuracy", "model", "world_size", "plan")
_LAST = ("wall_s", "started", "reason", "folder")


def runs(folder: str | Path = "runs") -> "pandas.DataFrame":
    """All runs below a folder, one line for each, the oldest first.

    Columns: `name`; `state` ("finished", "stopped", "failed"; "unfinished" where the folder does
    not say how it ended; "unreadable"); `steps` made; `loss` and `accuracy` (on the test split) as
    last measured; `model`, `world_size`, `plan`; `test_loss`, and `test_f1` of a metric "f1"; the
    optimizer and the other fields of the experiment, one that is named like another column as
    `experiment.steps`; `wall_s`, the seconds from its start to its end; `started`, by this host's
    clock; `reason`, why it ended so; `folder`, which `Run.load` takes.

    Args:
        folder: the folder of runs, or one above it; folders that begin with a dot are left out.

    Raises:
        FileNotFoundError: there is no such folder.
    """
    import pandas  # only here: it takes long to load

    if not Path(folder).is_dir():
        raise FileNotFoundError(f"there is no folder {folder}")
    rows = [_line(each) for each in _folders(Path(folder).resolve())]
    middle = [name for row in rows for name in row if name not in (*_FIRST, *_LAST)]
    frame = pandas.DataFrame(rows, columns=[*_FIRST, *dict.fromkeys(middle), *_LAST])
    return frame.sort_values("started", ignore_index=True, kind="stable")


def _folders(folder: Path) -> Iterator[Path]:
    """The folders of runs at or below one; what lies in a run's folder is its own."""
    if (folder / EXPERIMENT).is_file():
        yield folder
        return
    for path in sorted(folder.iterdir()):
        if path.is_dir() and not path.is_symlink() and not path.name.startswith("."):
            yield from _folders(path)


def _line(directory: Path) -> dict[str, Any]:
    try:
        return _summary(directory)
    except (ClusterError, ExperimentError, PlanError, OSError) as error:
        reason = str(error).partition("\n")[0]
        told = {"name": directory.name, "state": "unreadable", "reason": reason}
        return {**told, "folder": str(directory)}


def _summary(directory: Path) -> dict[str, Any]:
    experiment = Experiment.load(directory / EXPERIMENT)
    outcome, environment = RunOutcome.load(directory), Environment.load(directory)
    times = None if environment is None else environment.times
    rows, plan = _last_row(directory), experiment.plan
    started = None if times is None else times.started or times.submitted
    state = "unfinished" if outcome is None else RUN_STATES.get(outcome.state, outcome.state)
    told = {
        "name": directory.name,
        "state": state,
        "steps": int(rows[-1]["step"]) + 1 if rows else 0,
        "loss": rows[-1]["loss"] if rows else math.nan,
        "accuracy": math.nan,
        "model": plan.graph.source.name,
        "world_size": plan.world_size,
        "plan": short(plan),
        "wall_s": math.nan if times is None else times.wall_s,
        "started": None if started is None else datetime.fromtimestamp(started),
        "reason": "" if outcome is None else outcome.reason,
        "folder": str(directory),
        **last_evaluation(directory),
    }
    return told | beside(fields_of(experiment), told)


def _last_row(directory: Path) -> list[Row]:
    """The newest row of rank 0, if it has any."""
    for folder, _ in reversed(attempts(directory)):
        if rows := list(unpack_rows(newest(RankFiles(folder, 0).rows, 1))):
            return rows
    if not (directory / METRICS).exists():
        return []
    import pandas

    table = pandas.read_csv(directory / METRICS).query("rank == 0").tail(1)
    return [{**dict.fromkeys(COLUMNS, math.nan), **row} for row in table.to_dict("records")]  # type: ignore[dict-item]


Shown = str | int | float | bool | None


def short(value: Any) -> Shown:
    """What a name, or a table, shows of a value."""
    if isinstance(value, Plan):
        sizes = sorted({layer.group_size for layer in value.layers.values()} - {1})
        cut = f"cut over {'/'.join(map(str, sizes))}" if sizes else "data parallel"
        return f"{cut}, {value.world_size} ranks"
    if isinstance(value, Value):
        return repr(value)
    if isinstance(value, Mapping) and value.keys() == {"name", "file"}:
        return _own(**value)
    if isinstance(value, Mapping) and "own" in value:
        return _own(**value["own"]) + ", with error feedback" * value["error_feedback"]
    return value if isinstance(value, int | float | str | None) else str(value)


def _own(name: str, file: str) -> str:
    """What is a person's own; its file's content tells versions of it apart."""
    called = name.rpartition(":")[2].rpartition(".")[2]
    return f"{called} ({Path(file).stem.rpartition('-')[2][:6]})" if file else called


def fields_of(experiment: Experiment) -> dict[str, Any]:
    """Its fields by name: those of its optimizer beside its own, of others as 'sync.every'."""
    fields = experiment.model_dump(exclude={"plan"})
    optimizer = fields.pop("optimizer")
    flat: dict[str, Any] = {"optimizer": optimizer.pop("kind"), **optimizer}
    for name, value in fields.items():
        inner = value.items() if isinstance(value, Mapping) else [("", value)]
        flat |= {f"{name}.{each}".removesuffix("."): short(one) for each, one in inner}
    return flat


def beside(fields: Mapping[str, Any], results: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of an experiment beside results: one named like a result is "experiment.steps"."""
    return {f"experiment.{n}" if n in results else n: value for n, value in fields.items()}


def differences(experiments: Sequence[Experiment]) -> list[dict[str, Any]]:
    """The fields of each experiment that are not the same in all, as a table shows them."""
    plans = _labels([each.plan for each in experiments])
    told = [
        {"plan": plan, **fields_of(each)} for plan, each in zip(plans, experiments, strict=True)
    ]
    return varied(told)


def varied(told: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Of several mappings, the entries that are not the same in all."""
    names = list(dict.fromkeys(name for each in told for name in each))
    differ = [name for name in names if len({repr(each.get(name)) for each in told}) > 1]
    return [{name: each.get(name) for name in differ} for each in told]


def layer_differences(plans: Sequence[Plan]) -> list[dict[str, Any]]:
    """How each plan has the layers that do not lie alike in all; nothing for different models."""
    if len({plan.graph.fingerprint for plan in plans}) > 1:
        return [{} for _ in plans]
    return varied([{f"layer {n}": str(c) for n, c in plan.layers.items()} for plan in plans])


def _labels(plans: Sequence[Plan]) -> list[str]:
    """A text for each plan; those that would look alike, and are not, are numbered."""
    alike: dict[str, list[str]] = {}
    found = []
    for plan in plans:
        label, text = str(short(plan)), plan.to_toml()
        texts = alike.setdefault(label, [])
        if text not in texts:
            texts.append(text)
        number = texts.index(text) + 1
        found.append(f"{label} ({number})" if number > 1 else label)
    return found
