"""Engines as a person sees them: device, state, whose job, processor and memory."""

from collections.abc import Mapping, Sequence
from typing import Any

from workbench.store.record import EngineRecord, JobRecord


def rows(
    engines: Sequence[EngineRecord], devices: Sequence[object], jobs: Mapping[int, JobRecord]
) -> list[dict[str, Any]]:
    """One for each engine; the assistant, which serves the others, comes last.

    Args:
        engines: by index.
        devices: of those that take ranks, by index: cores or GPU, as text.
        jobs: those that hold engines, by number.
    """
    return [
        {
            "index": engine.index,
            "label": "assistant" if engine.is_assistant else str(engine.index),
            "device": _device(engine, devices),
            "kind": engine.kind,
            "state": engine.state,
            "job": "" if engine.job is None else _job(engine.job, jobs),
            "rank": _rank(engine, jobs),
            "cpu_share": round(engine.cpu_share, 2),
            "used_bytes": engine.gpu_bytes if engine.kind == "cuda" else engine.rss_bytes,
            "host_bytes": engine.rss_bytes,
            "memory_bytes": engine.memory_bytes,
            "pid": engine.pid,
            "death": engine.death,
        }
        for engine in sorted(engines, key=lambda each: (each.is_assistant, each.index))
    ]


def summary(engines: Sequence[EngineRecord], jobs: Sequence[JobRecord]) -> str:
    """How many engines are in which state, and how many jobs wait."""
    ranks = [engine for engine in engines if not engine.is_assistant]
    states: dict[str, int] = {}
    for engine in ranks:
        states[engine.state] = states.get(engine.state, 0) + 1
    told = ", ".join(f"{count} {state}" for state, count in states.items())
    number = f"{len(ranks)} engine{'s' * (len(ranks) != 1)}"
    waiting = sum(job.state == "queued" for job in jobs)
    queue = f"; {waiting} job{'s' * (waiting != 1)} waiting" if waiting else ""
    return f"{number}: {told}{queue}" if told else f"no engines{queue}"


def _device(engine: EngineRecord, devices: Sequence[object]) -> str:
    if engine.index < len(devices):
        known = devices[engine.index]
        host = getattr(known, "host", "")
        return f"{known} on {host}" if host else str(known)
    return engine.name


def _job(number: int, jobs: Mapping[int, JobRecord]) -> str:
    return f"{number}: {jobs[number].name}" if number in jobs else str(number)


def _rank(engine: EngineRecord, jobs: Mapping[int, JobRecord]) -> int | None:
    """Which rank of its job an engine is."""
    job = None if engine.job is None else jobs.get(engine.job)
    held = () if job is None else job.held
    return held.index(engine.index) if engine.index in held else None
