"""What came of the jobs of a sweep, as one table; also long after, and in another process."""

import math
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.client.jobs.variations import short
from workbench.plan.experiment import Experiment
from workbench.plan.metrics import Row
from workbench.plan.plan import Plan
from workbench.store import message
from workbench.store.history import RECENT
from workbench.store.rank_files import RankFiles
from workbench.store.record import JobRecord
from workbench.store.rows import ROW_BYTES, unpack
from workbench.store.store import Store

if TYPE_CHECKING:
    import pandas


def results(store: Store, tag: str) -> "pandas.DataFrame":
    """One line for each job of a sweep: what is its own, how far it is, and what it reached.

    Columns: `job`; the fields of experiments in which these differ; `state`, `step`; `loss`,
    `accuracy` (on the test split) and `samples_per_s` as last measured, NaN before; `duration`,
    seconds from its start to its end, or until now; `reason`.

    Args:
        store: that holds the jobs.
        tag: of the sweep.
    """
    import pandas  # only here: the job server imports this package too, and has no use for it

    jobs = [store.job(each.id) for each in store.jobs(tag=tag)]
    own = differences([message.unpack(job.packed) for job in jobs])
    return pandas.DataFrame(
        [
            {"job": job.id, **values, **_reached(store, job)}
            for job, values in zip(jobs, own, strict=True)
        ]
    )


def differences(experiments: Sequence[Experiment]) -> list[dict[str, Any]]:
    """The fields of each experiment that are not the same in all, as a table shows them."""
    plans = _labels([each.plan for each in experiments])
    told = [{"plan": plan, **_flat(each)} for plan, each in zip(plans, experiments, strict=True)]
    names = list(dict.fromkeys(name for each in told for name in each))
    varied = [name for name in names if len({repr(each.get(name)) for each in told}) > 1]
    return [{name: each.get(name) for name in varied} for each in told]


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


def _flat(experiment: Experiment) -> dict[str, Any]:
    """Its fields by name: those of its optimizer beside its own, of others as 'sync.every'."""
    fields = experiment.model_dump(exclude={"plan"})
    optimizer = fields.pop("optimizer")
    flat: dict[str, Any] = {"optimizer": optimizer.pop("kind"), **optimizer}
    for name, value in fields.items():
        inner = value.items() if isinstance(value, Mapping) else [("", value)]
        flat |= {f"{name}.{each}".removesuffix("."): short(one) for each, one in inner}
    return flat


def _reached(store: Store, job: JobRecord) -> dict[str, Any]:
    rows = _last_rows(store, job)
    accuracies = [row["accuracy"] for row in rows if not math.isnan(row["accuracy"])]
    duration = math.nan
    if job.started_at is not None:
        duration = (job.ended_at or time.time()) - job.started_at
    return {
        "state": job.state,
        "step": job.step,
        "loss": rows[-1]["loss"] if rows else math.nan,
        "accuracy": accuracies[-1] if accuracies else math.nan,
        "samples_per_s": rows[-1]["samples_per_s"] if rows else math.nan,
        "duration": duration,
        "reason": job.reason,
    }


def _last_rows(store: Store, job: JobRecord) -> list[Row]:
    """The newest rows of rank 0: what it left itself, or what the store has of it."""
    for attempt in range(job.attempt, 0, -1):
        files = RankFiles(Path(job.directory) / "attempts" / str(attempt), 0)
        with suppress(OSError), files.rows.open("rb") as file:
            whole = file.seek(0, os.SEEK_END) // ROW_BYTES
            file.seek(max(0, whole - RECENT) * ROW_BYTES)
            if packed := file.read(min(whole, RECENT) * ROW_BYTES):
                return list(unpack(packed))
    return store.rows(job.id, after=job.step - RECENT, ranks=(0,))
