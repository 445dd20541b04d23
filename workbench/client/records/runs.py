"""All runs below a folder, one line for each: read from their folders, without any cluster."""

import math
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.client.records.configuration import beside, fields_of, short
from workbench.client.records.environment import Environment
from workbench.plan.experiment.experiment import Experiment
from workbench.plan.experiment.metrics import COLUMNS, Row
from workbench.plan.io.errors import ExperimentError, PlanError
from workbench.store.errors import ClusterError
from workbench.store.evaluations import last_evaluation
from workbench.store.rank_files import RankFiles
from workbench.store.record import RUN_STATES
from workbench.store.run_folder import EXPERIMENT, METRICS, RunOutcome, attempts
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
