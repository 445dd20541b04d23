"""Machines on which little nets have something to win and to lose."""

from hypothesis import strategies as st

from workbench.plan.machine.device import Device, Link
from workbench.plan.machine.machine import Machine


def device(speed=1.0, kind="cuda"):
    rate = 1e8 * speed
    return Device(
        name=f"{speed:g}",
        kind=kind,
        memory_bytes=2**34,
        bandwidth=rate,
        flops={"fp32": rate},
        call_s=1e-6,
        load_s_per_byte=1e-9,
        step_s=1e-5,
    )


def machine(latency=1e-6, bandwidth=1e8, busy=0.2, slowdown=1.1, kind="cuda", speeds=None):
    link = Link(
        name="link",
        latency_s=latency,
        bandwidth=bandwidth,
        reduction_s_per_byte=0.1 / bandwidth,
        busy=busy,
    )
    devices = tuple(device(speed, kind) for speed in speeds or (1.0,))
    return Machine(name="toy", devices=devices, within=link, slowdown=slowdown)


@st.composite
def machines(draw, world=2):
    return machine(
        latency=draw(st.sampled_from((1e-8, 1e-6, 1e-4))),
        bandwidth=draw(st.sampled_from((1e6, 1e8, 1e10))),
        busy=draw(st.sampled_from((0.0, 0.3, 1.0))),
        slowdown=draw(st.sampled_from((1.0, 1.3))),
        kind=draw(st.sampled_from(("cpu", "cuda"))),
        speeds=draw(st.sampled_from((None, tuple(1.0 + 2 * (r % 2) for r in range(world))))),
    )
