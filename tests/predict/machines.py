"""Machines with round figures, on which a step can be computed by hand."""

from workbench.plan.machine.device import Device, Link
from workbench.plan.machine.machine import Machine

FAST = Link(name="infinitely fast", latency_s=0, bandwidth=1e300)


def device(**fields):
    """1 Gflop/s and nothing else counts: no overhead, no limit of memory."""
    given = dict(
        name="toy", kind="cpu", memory_bytes=2**30, bandwidth=1e300, flops={"fp32": 1e9},
        update_s_per_byte={"sgd": 0.0},
    )  # fmt: skip
    return Device(**given | fields)


def link(**fields):
    """1 GB/s, whatever is added."""
    return Link(**dict(name="wire", latency_s=0, bandwidth=1e9) | fields)


def machine(*devices, **fields):
    given = dict(name="toys", devices=devices or (device(),), within=link())
    return Machine(**given | fields)
