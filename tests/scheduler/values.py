"""Jobs and engines, said in few words."""

from typing import Any

from workbench.store.record import EngineRecord, JobRecord, Request

GIB = 1 << 30


def request(engines: int = 1, **fields: Any) -> Request:
    return Request(**{"kind": "train", "name": "net", "task": "m:f", "engines": engines, **fields})


def job(number: int, engines: int = 1, **fields: Any) -> JobRecord:
    defaults = {"kind": "train", "name": "net", "task": "m:f", "submitted_at": float(number)}
    return JobRecord(**{**defaults, "id": number, "engines": engines, **fields})


def running(number: int, held: tuple[int, ...], **fields: Any) -> JobRecord:
    more = {"state": "running", "attempt": 1, "started_at": 0.0, "began_at": 0.0}
    return job(number, **{"engines": len(held), "held": held, **more, **fields})


def engines(count: int, *busy: JobRecord, **fields: Any) -> list[EngineRecord]:
    """So many engines, those that jobs hold being busy."""
    holder = {place: each.id for each in busy for place in each.held}
    return [
        EngineRecord(
            index=index,
            job=holder.get(index),
            **{"state": "busy" if index in holder else "idle", "memory_bytes": 8 * GIB, **fields},
        )
        for index in range(count)
    ]
