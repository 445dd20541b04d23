"""One machine from several calibrations of the same engines: the median of each figure."""

from collections.abc import Sequence
from statistics import fmean, median

from workbench.plan.device import Device
from workbench.plan.machine import Machine
from workbench.plan.sample import Sample


def merged(machines: Sequence[Machine]) -> Machine:
    """What is in the middle of calibrations that measured the same layers.

    Links are the first one's. What is uneven adds up as variances do.

    Args:
        machines: one or more.
    """
    ranks = max(len(machine.devices) for machine in machines)
    devices = [_device([machine.device(rank) for machine in machines]) for rank in range(ranks)]
    return machines[0].replace(
        devices=tuple(devices),
        unevenness=fmean(machine.unevenness**2 for machine in machines) ** 0.5,
        jitter_s=fmean(machine.jitter_s for machine in machines),
    )


def _device(found: Sequence[Device]) -> Device:
    """One rank's."""
    first, samples = found[0], dict[tuple[str, str, int], list[Sample]]()
    for device in found:
        for sample in device.samples:
            samples.setdefault((sample.key, sample.precision, sample.rows), []).append(sample)
    return first.replace(
        samples=tuple(map(_sample, samples.values())),
        load_s_per_byte=median(device.load_s_per_byte for device in found),
        step_s=median(device.step_s for device in found),
        update_s_per_byte={
            kind: median(device.update_s_per_byte[kind] for device in found)
            for kind in first.update_s_per_byte
        },
    )


def _sample(found: Sequence[Sample]) -> Sample:
    return found[0].replace(
        forward_s=median(sample.forward_s for sample in found),
        backward_s=median(sample.backward_s for sample in found),
        error=median(sample.error for sample in found),
    )
