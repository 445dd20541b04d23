"""The tables, and how values become rows of them."""

import json
import sqlite3
from collections.abc import Collection, Mapping
from dataclasses import asdict, fields
from typing import Any, get_args

from workbench.cluster.jobs.owner import Owner
from workbench.cluster.jobs.record import AttemptRecord, EngineRecord, ErrorRecord, JobRecord

APPLICATION = 0x77626A73  # SQLite's header says whose file it is
VERSION = 1

# Large values, which lists of jobs do without, have a table of their own; of `variants`, the
# numbers of ranks stay.
APART = ("packed", "keywords")
JOB_COLUMNS = tuple(each.name for each in fields(JobRecord) if each.name not in APART)
ENGINE_COLUMNS = tuple(each.name for each in fields(EngineRecord))

SCHEMA = (
    "CREATE TABLE jobs (id INTEGER PRIMARY KEY AUTOINCREMENT, "
    f"{', '.join(name for name in JOB_COLUMNS if name != 'id')})",
    "CREATE INDEX jobs_by_state ON jobs (state)",
    # What is "packed", "keywords", or a number of ranks.
    "CREATE TABLE packed (job, what, bytes BLOB, PRIMARY KEY (job, what)) WITHOUT ROWID",
    'CREATE TABLE engines ("index" INTEGER PRIMARY KEY, '
    f"{', '.join(name for name in ENGINE_COLUMNS if name != 'index')})",
    "CREATE TABLE commands "
    "(id INTEGER PRIMARY KEY AUTOINCREMENT, kind, job, payload, at, done_at, error)",
    "CREATE INDEX commands_by_done ON commands (done_at)",
    "CREATE TABLE events "
    "(id INTEGER PRIMARY KEY AUTOINCREMENT, time, level, kind, text, job, engine)",
    "CREATE INDEX events_by_job ON events (job)",
    # Messages of no job have job 0: no two of SQLite's NULLs are the same key.
    "CREATE TABLE ledger (job, direction, messages, bytes, PRIMARY KEY (job, direction)) "
    "WITHOUT ROWID",
    "CREATE TABLE owners (host, pid, started, PRIMARY KEY (host, pid, started)) WITHOUT ROWID",
    "CREATE TABLE meta (key PRIMARY KEY, value) WITHOUT ROWID",
    "CREATE TABLE metrics (job INTEGER, rank INTEGER, step INTEGER, row BLOB, "
    "PRIMARY KEY (job, rank, step)) WITHOUT ROWID",
)


def encoded(values: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a job as SQLite takes them."""
    return {name: _encoded(name, value) for name, value in values.items()}


def _encoded(name: str, value: Any) -> Any:
    if value is None:
        return None
    if name in ("places", "held", "pids"):
        return json.dumps(list(value))
    if name in ("owner", "error"):
        return json.dumps(asdict(value))
    if name == "attempts":
        return json.dumps([asdict(each) for each in value])
    if name == "variants":
        return json.dumps(sorted(value))
    return value


def job_of(row: sqlite3.Row, packed: Mapping[str, bytes]) -> JobRecord:
    """The job that a row holds, with what is packed."""
    values = {name: _decoded(name, row[name]) for name in JOB_COLUMNS}
    variants = {ranks: packed.get(str(ranks), b"") for ranks in values["variants"]}
    whole = {what: packed.get(what, b"") for what in APART}
    return JobRecord(**values | whole | {"variants": variants})


def _decoded(name: str, value: Any) -> Any:
    if value is None:
        return None
    if name in ("places", "held", "pids", "variants"):
        return tuple(json.loads(value))
    if name == "owner":
        return Owner(**json.loads(value))
    if name == "error":
        return ErrorRecord(**json.loads(value))
    if name == "attempts":
        return tuple(
            AttemptRecord(**{**each, "places": tuple(each["places"])}) for each in json.loads(value)
        )
    return bool(value) if name == "preemptible" else value


def engine_of(row: sqlite3.Row) -> EngineRecord:
    """The engine that a row holds."""
    values = {name: row[name] for name in ENGINE_COLUMNS}
    return EngineRecord(**{**values, "is_assistant": bool(values["is_assistant"])})


def require_known(given: Mapping[str, Any], known: Collection[str], what: str) -> None:
    """Raises ValueError where a field is none of those that may change."""
    if unknown := sorted(set(given) - set(known)):
        raise ValueError(f"{what} has no {unknown} to change; there are {sorted(known)}")


def require_state(given: Mapping[str, Any], valid: Any) -> None:
    """Raises ValueError where the state is none of a literal's."""
    if "state" in given and given["state"] not in get_args(valid):
        raise ValueError(f"a state is one of {get_args(valid)}, got {given['state']!r}")


def marks(values: Collection[Any]) -> str:
    """'?, ?, ?': a place in a statement for each value."""
    return ", ".join("?" * len(values))
