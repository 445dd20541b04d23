"""What people see of clusters, runs and hosts: text, and HTML that reads well without a kernel."""

import math
from html import escape
from typing import TYPE_CHECKING

import psutil

from workbench.plan.html import table
from workbench.plan.metrics import Row

if TYPE_CHECKING:
    from workbench.client.cluster import Cluster
    from workbench.client.run.run import Run


def run_line(run: "Run") -> str:
    """One line: where the run stands."""
    return f"<Run {run.directory.name}: {', '.join(_standing(run))}>"


def run_html(run: "Run") -> str:
    """Where the run stands, and one line for each rank."""
    ranks = [
        (
            str(int(row["rank"])),
            f"{row['compute_s'] * 1e3:.0f} ms",
            f"{row['communication_s'] * 1e3:.0f} ms",
            f"{row['wait_s'] * 1e3:.0f} ms",
            size(row["tensor_bytes"]),
            size(max(r["peak_bytes"] for r in run.rows if r["rank"] == row["rank"])),
            size(row["rss_bytes"]),
            size(row["gpu_bytes"]) if row["gpu_bytes"] else "-",
        )
        for row in _latest(run)
    ]
    head = ("rank", "compute", "communication", "wait", "tensors", "peak", "process", "GPU")
    error = f"<pre>{escape(str(run.error))}</pre>" if run.error is not None else ""
    notes = "".join(f"<br>{escape(note)}" for note in run.notes)
    return (
        f"<div><p><b>{escape(run.experiment.plan.graph.source.name)}</b>: "
        f"{escape(', '.join(_standing(run)))}<br>{escape(str(run.directory))}{notes}</p>{error}"
        + (table(head, ranks) if ranks else "")
        + "</div>"
    )


def cluster_line(cluster: "Cluster") -> str:
    """One line: engines and what they compute on."""
    if cluster.is_stopped:
        return f"<Cluster of {len(cluster)} engines: stopped>"
    kinds = dict.fromkeys(device.name for device in cluster.devices)
    shared = max(device.sharers for device in cluster.devices)
    crowded = f", up to {shared} engines on one" if shared > 1 else ""
    busy, dead = len(cluster.occupied), len(cluster.dead)
    return (
        f"<Cluster of {len(cluster)} engines on {_hosts(cluster)} "
        f"({', '.join(kinds)}{crowded}): {busy} busy" + (f", {dead} dead" if dead else "") + ">"
    )


def cluster_html(cluster: "Cluster") -> str:
    """One line for each engine."""
    if cluster.is_stopped:
        return f"<div>{escape(cluster_line(cluster))}</div>"
    rows = []
    for index, device in enumerate(cluster.devices):
        pid = cluster.pids[index]
        rows.append(
            (
                str(index),
                device.host,
                str(pid),
                str(device),
                str(device.threads),
                f"{_resident(pid)} of {size(device.memory_bytes)}",
                "dead" if index in cluster.dead else cluster.occupied.get(index, "idle"),
            )
        )
    head = ("engine", "host", "pid", "device", "threads", "memory", "state")
    hosts = f"<br>{escape(repr(cluster.hosts))}" if cluster.hosts is not None else ""
    return f"<div><p>{escape(cluster_line(cluster))}{hosts}</p>{table(head, rows)}</div>"


def size(num_bytes: float) -> str:
    """Bytes for people: 1536 is "1.5 KiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024 or unit == "GiB":
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.3g} {unit}"
        num_bytes /= 1024
    raise AssertionError("unreachable")


def _resident(pid: int) -> str:
    try:
        return size(psutil.Process(pid).memory_info().rss)
    except psutil.Error:
        return "-"


def _hosts(cluster: "Cluster") -> str:
    """Which host, or which engines are on which."""
    engines: dict[str, list[str]] = {}
    for index, device in enumerate(cluster.devices):
        engines.setdefault(device.host, []).append(str(index))
    if len(engines) == 1:
        return cluster.devices[0].host
    return "; ".join(f"{host}: {', '.join(those)}" for host, those in engines.items())


def _standing(run: "Run") -> list[str]:
    told: list[str] = [run.state]
    if run.is_stopping and not run.is_done:
        told[0] += " (stopping)"
    if run.reason:
        told[0] += f": {run.reason}"
    if rows := _latest(run):
        done = int(min(row["step"] for row in rows)) + 1
        told.append(f"step {done} of {run.experiment.steps}")
        told.append(f"loss {rows[0]['loss']:.4g}")
        told.append(f"{rows[0]['samples_per_s']:.4g} samples/s")
    accuracy = run.evaluation.get("accuracy", math.nan)
    if not math.isnan(accuracy):
        told.append(f"test accuracy {accuracy:.1%}")
    if run.error is not None:
        told.append(str(run.error).partition("\n")[0])
    return told


def _latest(run: "Run") -> list[Row]:
    """The newest row of each rank, in their order."""
    found: dict[int, Row] = {}
    for row in reversed(run.rows):
        found.setdefault(int(row["rank"]), row)
        if len(found) == run.experiment.plan.world_size:
            break
    return [found[rank] for rank in sorted(found)]
