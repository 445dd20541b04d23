"""From what ranks measured of layers and of themselves to devices."""

from collections.abc import Mapping, Sequence
from statistics import fmean, median, stdev

from workbench.cluster.calibrate_cache import processor
from workbench.cluster.devices import Device as Place
from workbench.plan.device import Device
from workbench.plan.experiment import Experiment
from workbench.plan.sample import Sample
from workbench.plan.work import Work
from workbench.train.measure import LayersMeasured, works_on
from workbench.train.measure_device import DeviceMeasured

# Ranks whose devices differ by more are not of one kind.
_ALIKE = 1.5

Samples = dict[tuple[str, str, int], Sample]


def devices_of(found: Sequence[DeviceMeasured], places: Sequence[Place]) -> tuple[Device, ...]:
    """One device where all ranks have the same and attain the same, else one for each rank."""
    every = [_device([own], place, places) for own, place in zip(found, places, strict=True)]
    kinds = {(place.kind, place.name, place.threads) for place in places}
    rates = [own.flops["fp32"] for own in found]
    if len(kinds) == 1 and max(rates) < _ALIKE * min(rates):
        return (_device(found, places[0], places),)
    return tuple(every)


def _device(found: Sequence[DeviceMeasured], place: Place, places: Sequence[Place]) -> Device:
    """What some ranks found, on average; on a CPU, ranks share their host's memory."""
    cpu = place.kind == "cpu"
    sharers = sum(other.host == place.host for other in places) if cpu else place.sharers
    return Device(
        name=processor() if cpu else place.name,
        kind="cpu" if cpu else "cuda",
        memory_bytes=place.memory_bytes // sharers,
        bandwidth=fmean(own.bandwidth for own in found),
        flops={name: fmean(own.flops[name] for own in found) for name in found[0].flops},
        call_s=fmean(own.call_s for own in found),
        update_s_per_byte={
            kind: fmean(own.update_s_per_byte[kind] for own in found)
            for kind in found[0].update_s_per_byte
        },
        coding_s_per_byte={
            name: fmean(own.coding_s_per_byte[name] for own in found)
            for name in found[0].coding_s_per_byte
        },
        source="measured, all ranks at once",
    )


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

    Args:
        devices: one for all ranks, or one for each.
        experiment: that was measured.
        found: of each rank, at each number of rows.
    """
    if len(devices) == 1:
        return (_extended(devices[0], experiment, dict(enumerate(found))),)
    return tuple(
        _extended(device, experiment, {rank: found[rank]}) for rank, device in enumerate(devices)
    )


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
