"""From what ranks measured of layers and of themselves to devices."""

from collections.abc import Mapping, Sequence
from statistics import fmean, median, stdev

import numpy as np

from workbench.cluster.calibrate_alike import classes, same_work, tables_of
from workbench.cluster.calibrate_cache import processor
from workbench.cluster.devices import Device as Place
from workbench.plan.device import Device
from workbench.plan.experiment import Experiment
from workbench.plan.sample import Sample
from workbench.plan.work import Work
from workbench.train.measure import LayersMeasured, works_on
from workbench.train.measure_device import DeviceMeasured

Samples = dict[tuple[str, str, int], Sample]


def devices_of(found: Sequence[DeviceMeasured], places: Sequence[Place]) -> tuple[Device, ...]:
    """One device where all ranks have equal ones, else one for each rank; equal ones are one."""
    every = [_device(own, place, places) for own, place in zip(found, places, strict=True)]
    speeds = classes([np.array([_seconds(own) for own in found])])
    of = [(speed, _kind(device)) for speed, device in zip(speeds, every, strict=True)]
    means = [_mean_of(_those(every, of, own)) for own in of]
    return _collapsed([mean or own for mean, own in zip(means, every, strict=True)])


def _device(own: DeviceMeasured, place: Place, places: Sequence[Place]) -> Device:
    """What one rank found; on a CPU, ranks share their host's memory."""
    cpu = place.kind == "cpu"
    sharers = sum(other.host == place.host for other in places) if cpu else place.sharers
    return Device(
        name=processor() if cpu else place.name,
        kind="cpu" if cpu else "cuda",
        memory_bytes=place.memory_bytes // sharers,
        bandwidth=own.bandwidth,
        flops=own.flops,
        call_s=own.call_s,
        recomputed_s=own.recomputed_s,
        update_s_per_byte=own.update_s_per_byte,
        coding_s_per_byte=own.coding_s_per_byte,
        source="measured, all ranks at once",
    )


def _seconds(own: DeviceMeasured) -> list[float]:
    """What a rank takes for a unit of each thing that was measured."""
    rates = (own.bandwidth, *own.flops.values())
    each = (own.call_s, *own.update_s_per_byte.values(), *own.coding_s_per_byte.values())
    return [*(1 / rate for rate in rates), *each]


def _those(every: Sequence[Device], of: Sequence[object], wanted: object) -> list[Device]:
    """The devices of one class."""
    return [device for device, own in zip(every, of, strict=True) if own == wanted]


def _mean_of(devices: Sequence[Device]) -> Device | None:
    """Equal devices as one; None: they were told apart before, by their layers or their kinds."""
    first = devices[0]
    if all(device == first for device in devices):
        return first
    if any(device.samples or _kind(device) != _kind(first) for device in devices):
        return None

    def mean(field: str) -> dict[str, float]:
        every = [getattr(device, field) for device in devices]
        return {name: fmean(own[name] for own in every) for name in every[0]}

    return first.replace(
        bandwidth=fmean(device.bandwidth for device in devices),
        flops=mean("flops"),
        call_s=fmean(device.call_s for device in devices),
        recomputed_s=fmean(device.recomputed_s for device in devices),
        update_s_per_byte=mean("update_s_per_byte"),
        coding_s_per_byte=mean("coding_s_per_byte"),
    )


def _kind(device: Device) -> tuple[str, str, int]:
    return device.kind, device.name, device.memory_bytes


def _collapsed(devices: Sequence[Device]) -> tuple[Device, ...]:
    """One device if all are the same."""
    return tuple(devices[: None if any(own != devices[0] for own in devices) else 1])


def missing(devices: Sequence[Device], experiment: Experiment, rows: Sequence[int]) -> list[int]:
    """Of these numbers of rows, those at which a device has not measured all of a plan's layers."""
    known = [_samples(device) for device in devices]
    ranks = range(experiment.plan.world_size)
    return [
        count
        for count in rows
        if any(
            (work.key, work.precision, work.rows) not in known[rank % len(devices)]
            for rank in ranks
            for work in works_on(experiment.plan, rank, count, experiment.precision)
        )
    ]


def extended(
    devices: Sequence[Device], experiment: Experiment, found: Sequence[Sequence[LayersMeasured]]
) -> tuple[Device, ...]:
    """The devices with the layers that ranks measured; what is known stays as it is.

    Ranks that took equally long for the same layers share what they found, the others have devices
    of their own from then on.

    Args:
        devices: one for all ranks, or one for each.
        experiment: that was measured.
        found: of each rank, at each number of rows.
    """
    every = [devices[rank % len(devices)] for rank in range(len(found))]
    of = _classes(every, experiment, found)
    known = list(every)
    for wanted in set(of):
        members = [rank for rank, own in enumerate(of) if own == wanted]
        seen = {rank: found[rank] for rank in members}
        one = _mean_of(_those(every, of, wanted))
        shared = None if one is None else _extended(one, experiment, seen)
        for rank in members:
            known[rank] = shared or _extended(every[rank], experiment, seen)
    return _collapsed(known)


def _classes(
    devices: Sequence[Device], experiment: Experiment, found: Sequence[Sequence[LayersMeasured]]
) -> Sequence[int]:
    """Of each rank: by what ranks with the same to do took, else by what is known of devices."""
    if all(same_work(experiment, column) for column in zip(*found, strict=True)):
        return classes(tables_of(found))
    return [devices.index(device) for device in devices]


def _extended(
    device: Device, experiment: Experiment, found: Mapping[int, Sequence[LayersMeasured]]
) -> Device:
    every = [own for measured in found.values() for own in measured]
    loaded = [own.load_s / own.image_bytes for own in every if own.image_bytes]
    updated = [own.update_s / own.parameter_bytes for own in every if own.parameter_bytes]
    device = device.replace(
        load_s_per_byte=device.load_s_per_byte or median(loaded),
        step_s=device.step_s or max(0.0, median(own.besides_s for own in every)),
        update_s_per_byte={
            **device.update_s_per_byte,
            experiment.optimizer.kind: median(updated),
        },
    )
    seen: dict[Work, list[tuple[float, float, float]]] = {}
    for rank, measured in found.items():
        for own in measured:
            works = works_on(experiment.plan, rank, own.rows, experiment.precision)
            each = _unexplained(own, device, experiment) / sum(map(len, works.values()))
            for work, times in zip(works, own.layers.tolist(), strict=True):
                seen.setdefault(work, []).append(_shifted(times, each))
    new = {_place(sample): sample for sample in (_sample(*item) for item in seen.items())}
    return device.replace(samples=tuple({**new, **_samples(device)}.values()))


def _unexplained(own: LayersMeasured, device: Device, experiment: Experiment) -> float:
    """Seconds of a step that neither its layers nor the device's figures account for."""
    update = device.update_s_per_byte[experiment.optimizer.kind] * own.parameter_bytes
    figures = device.load_s_per_byte * own.image_bytes + update + device.step_s
    return own.load_s + own.update_s + own.besides_s - figures


def _shifted(times: Sequence[float], seconds: float) -> tuple[float, float, float]:
    """A layer's times with its share of what is unexplained, so that steps take as they did.

    What is less than nothing is what tracing took, which is the same for small layers and large.
    """
    forward, backward, error = times
    share = seconds * backward / (forward + backward) if forward + backward else 0.0
    forward, backward = (
        max(value + more, value / 2)
        for value, more in ((forward, seconds - share), (backward, share))
    )
    return forward, backward, error


def _sample(work: Work, times: Sequence[tuple[float, float, float]]) -> Sample:
    """The mean over ranks; its error is a rank's own and the spread over the ranks."""
    sums = [forward + backward for forward, backward, _ in times]
    spread = stdev(sums) / fmean(sums) if len(sums) > 1 and fmean(sums) else 0.0
    forward, backward, error = (fmean(values) for values in zip(*times, strict=True))
    return Sample.of(work, forward, backward, error + spread)


def _samples(device: Device) -> Samples:
    return {_place(sample): sample for sample in device.samples}


def _place(sample: Sample) -> tuple[str, str, int]:
    return sample.key, sample.precision, sample.rows
