"""Devices whose timing does not converge: said, and replaced by what was last known of them."""

from workbench.plan.device import Device
from workbench.plan.errors import MachineError
from workbench.plan.machine import Machine

TRUSTED = 0.25
"""Relative half width of the 95 % band of a device's times up to which they are believed."""


def spread(device: Device, precision: str) -> float:
    """The relative half width of the bands of a device's samples, weighted by their seconds.

    0 for a device of which no layer was measured.
    """
    samples = [sample for sample in device.samples if sample.precision == precision]
    seconds = [sample.forward_s + sample.backward_s for sample in samples]
    errors = [sample.error * own for sample, own in zip(samples, seconds, strict=True)]
    return sum(errors) / sum(seconds) if sum(seconds) > 0 else 0.0


def trusted(
    machine: Machine, last_good: Machine | None, ranks: int, precision: str
) -> tuple[list[Device], tuple[str, ...]]:
    """(the device of each rank, what is to be said of those that did not converge).

    Args:
        machine: as measured now.
        last_good: as measured before, for devices that did not converge now.
        ranks: their number.
        precision: of what is computed.

    Raises:
        MachineError: a machine that has devices for another number of ranks.
    """
    for each in (machine, *((last_good,) if last_good is not None else ())):
        if len(each.devices) not in (1, ranks):
            raise MachineError(
                f"machine {each.name!r} has {len(each.devices)} devices, the plan {ranks} ranks"
            )
    devices, notes = list[Device](), list[str]()
    for rank in range(ranks):
        device = machine.device(rank)
        now = spread(device, precision)
        if now > TRUSTED:
            before = None if last_good is None else last_good.device(rank)
            kept = before is not None and spread(before, precision) <= TRUSTED
            notes.append(_said(rank, device, now, kept))
            device = before if kept and before is not None else device
        devices.append(device)
    return devices, tuple(notes)


def _said(rank: int, device: Device, now: float, kept: bool) -> str:
    used = "its last good times are used" if kept else "its times are used as they are"
    return (
        f"the timing of rank {rank} ({device.name}) did not converge: +- {now:.0%}, "
        f"{TRUSTED:.0%} is believed; {used}"
    )
