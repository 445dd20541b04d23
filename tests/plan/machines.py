"""Small machines and samples, written by hand."""

from workbench.plan.machine.device import Curve, Device, Link, Sample
from workbench.plan.machine.machine import Machine
from workbench.plan.machine.work import Work

LINK = Link(name="link", latency_s=1e-4, bandwidth=1e9, reduction_s_per_byte=1e-10)


def device(*samples: Sample, **fields: object) -> Device:
    figures = dict(
        name="device",
        kind="cpu",
        memory_bytes=2**30,
        bandwidth=1e10,
        flops={"fp32": 1e11},
        call_s=1e-6,
    )
    return Device(**{**figures, "samples": samples, **fields})


def machine(*devices: Device, **fields: object) -> Machine:
    return Machine(
        **{"name": "machine", "devices": devices or (device(),), "within": LINK, **fields}
    )


def work(rows: int = 8, *, key: str = "linear Linear 4 > 4", **fields: object) -> Work:
    kind = key.split(" ")[0]
    values = dict(flops=1e6 * rows, bytes=1e4 * rows, weight_bytes=64.0, precision="fp32")
    return Work(kind=kind, key=key, rows=rows, **{**values, **fields})


def sample(work: Work, forward_s: float, backward_s: float, error: float = 0.02) -> Sample:
    return Sample.of(work, forward_s, backward_s, error)


CURVED = LINK.replace(curves=(Curve(op="all_reduce", ranks=4, points=((1e3, 1e-4), (1e6, 1e-3))),))
