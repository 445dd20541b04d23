"""From what ranks measured of layers and of themselves to devices.

Ranks whose devices are equal, as far as measurements tell, share one. Ranks measure the same things
at the same time: a table of seconds, one row for each rank. How much longer a rank takes than
another is the mean over the table of the logarithms' differences, known within Student's interval,
for all pairs of ranks together. Two devices are apart if even its near end is more than what is
tolerated, or its middle so much that being equal would have to be proved; and that in every table:
one goes over steps in time, so that a moment in which a rank's processor was busy with something
else counts as chance, one over shapes of layers, so that one odd shape does.

How unequally fast ranks are that have the same to do: from parts of steps to two figures.

Steps are cut into 1, 2, 4, ... stretches. In each, the last rank is behind the mean of all by so
many seconds, as many as ranks would wait there if they met. `predict/time/streams.py` says how that
depends on the stretch's length:

    behind = largest(k) sqrt((unevenness t)^2 + jitter t)
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median, stdev

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtrit

from workbench.client.calibration.cache import processor
from workbench.plan.experiment.experiment import Experiment
from workbench.plan.machine.device import Device, Sample, costs
from workbench.plan.machine.machine import Machine
from workbench.plan.machine.work import Work, Workspace, takes_workspace, work_of
from workbench.predict.time.streams import largest
from workbench.store.cluster_spec import EngineDevice as Place
from workbench.train.measure.device import DeviceMeasured
from workbench.train.measure.layers import LayersMeasured, works_on
from workbench.train.measure.repeating import CONFIDENCE

BORNE = 0.05  # relative: less is not worth a curve of its own
UNLIKELY = 1.5  # ratio beyond which devices are taken for unequal, however little is sure
_BLOCKS = 6  # of steps, since neighbouring ones are disturbed by the same
_FEWEST = 3  # columns from which on a table says anything
_NEARLY = 0.01  # relative: of all that a rank computes and moves
_MATTERS = 0.01  # of all seconds: parts that take less need not be known as well

Seconds = NDArray[np.float64]


def classes(tables: Sequence[Seconds]) -> tuple[int, ...]:
    """The class of each rank's device, from 0 on: equal devices have the same one.

    Ranks in the order of their speed are in one class as long as none is apart from another.

    Args:
        tables: positive seconds [ranks, things], the same ones on all ranks.
    """
    ranks = len(tables[0])
    telling = [table for table in tables if table.shape[1] >= _FEWEST]
    if ranks == 1 or not telling:
        return (0,) * ranks
    apart = np.all([_apart(table) for table in telling], axis=0)
    found = np.zeros(ranks, dtype=np.int64)
    members: list[int] = []
    for rank in np.argsort(np.log(telling[0]).mean(axis=1), kind="stable").tolist():
        if apart[rank, members].any():
            members = []
        members.append(rank)
        found[rank] = members[0]
    named: dict[int, int] = {}
    return tuple(named.setdefault(first, len(named)) for first in found.tolist())


def tables_of(found: Sequence[Sequence[LayersMeasured]]) -> list[Seconds]:
    """What ranks with the same to do took: one table over steps, one over parts of a step."""
    steps, shapes = [], []
    for column in zip(*found, strict=True):
        parts = np.stack([own.parts for own in column]).astype(np.float64)
        blocks = np.array_split(parts.sum(axis=2), min(_BLOCKS, parts.shape[1]), axis=1)
        steps.append(np.stack([block.mean(axis=1) for block in blocks], axis=1))
        each = parts.mean(axis=1)
        shapes.append(each[:, (each > _MATTERS * each.sum(axis=1, keepdims=True)).all(axis=0)])
    return [np.concatenate(steps, axis=1), np.concatenate(shapes, axis=1)]


def same_work(experiment: Experiment, column: Sequence[LayersMeasured]) -> bool:
    """Whether all ranks had the same to do."""
    rows, precision = column[0].rows, experiment.precision
    works = (works_on(experiment.plan, rank, rows, precision) for rank in range(len(column)))
    return len({tuple(own) for own in works}) == 1


def as_much_work(experiment: Experiment, column: Sequence[LayersMeasured]) -> bool:
    """Whether ranks had as much to do, nearly: a layer's pieces may differ by an element or so."""
    totals = []
    for rank, own in enumerate(column):
        works = works_on(experiment.plan, rank, own.rows, experiment.precision).items()
        totals.append([sum(getattr(w, of) * len(n) for w, n in works) for of in ("flops", "bytes")])
    least, most = np.min(totals, axis=0), np.max(totals, axis=0)
    return bool((most <= (1 + _NEARLY) * least).all())


def _apart(table: Seconds) -> NDArray[np.bool_]:
    """[ranks, ranks]: whether two take unequally long."""
    ranks, count = table.shape
    logs = np.log(table)
    mean, covariance = logs.mean(axis=1), np.cov(logs)
    own = np.diag(covariance)
    variance = np.maximum(own[:, None] + own - 2 * covariance, 0.0)
    pairs = ranks * (ranks - 1) / 2
    width = stdtrit(count - 1, 1 - (1 - CONFIDENCE) / 2 / pairs) * np.sqrt(variance / count)
    between = np.abs(mean[:, None] - mean)
    return np.asarray((between - width > -np.log1p(-BORNE)) | (between > np.log(UNLIKELY)))


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
        sharers=1 if cpu else sharers,
        library_bytes=own.library_bytes,
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


def unmeasured(devices: Sequence[Device], experiment: Experiment, rows: Sequence[int]) -> bool:
    """Whether a device does not know what some layer of a plan takes at these rows."""
    plan = experiment.plan
    return any(
        device.workspace(work) is None
        for rank in range(plan.world_size)
        for device in [devices[rank % len(devices)]]
        for layer in plan.graph.layers
        if takes_workspace(layer, device.kind)
        for count in rows
        for work in [work_of(plan, layer, rank, (count,) * plan.world_size, experiment.precision)]
    )


def with_workspaces(
    devices: Sequence[Device], found: Sequence[Sequence[Workspace]]
) -> tuple[Device, ...]:
    """The devices with the workspaces that ranks measured.

    Ranks with devices of one kind share what they found; where they found unequal bytes, the most
    count.
    """
    every = [devices[rank % len(devices)] for rank in range(len(found))]
    shared: dict[tuple[str, str, int], tuple[Workspace, ...]] = {}
    for device in every:
        mine = [
            own for other, own in zip(every, found, strict=True) if _kind(other) == _kind(device)
        ]
        if _kind(device) not in shared:
            shared[_kind(device)] = _united([one for own in mine for one in own])
    return _collapsed(
        [
            device.replace(workspaces=_united([*device.workspaces, *shared[_kind(device)]]))
            for device in every
        ]
    )


def _united(workspaces: Sequence[Workspace]) -> tuple[Workspace, ...]:
    """One workspace for each layer shape, with the most bytes at each number of rows."""
    points: dict[tuple[str, str], dict[int, tuple[int, ...]]] = {}
    for one in workspaces:
        known = points.setdefault((one.key, one.precision), {})
        for rows, *needed in one.points:
            known[rows] = tuple(map(max, needed, known.get(rows, needed)))
    return tuple(
        Workspace(
            key=key,
            precision=precision,
            points=tuple((rows, *known[rows]) for rows in sorted(known)),
        )
        for (key, precision), known in points.items()
    )


def extended(
    devices: Sequence[Device], experiment: Experiment, found: Sequence[Sequence[LayersMeasured]]
) -> tuple[Device, ...]:
    """The devices with the layers that ranks measured; what is known stays as it is.

    Ranks that took equally long for the same layers share what they found, the others have devices
    of their own from then on.
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


_NOTHING = 1e-18  # seconds squared


@dataclass(frozen=True)
class Behind:
    """Stretches of one length.

    Attributes:
        seconds: what the mean rank takes for a stretch, in seconds.
        squared: seconds by which the last of two or more ranks is behind the mean, over the
            expected largest of so many normal values, squared.
    """

    seconds: float
    squared: float


def stretches_of(
    experiment: Experiment, found: Sequence[Sequence[LayersMeasured]], *, own_devices: bool
) -> list[Behind]:
    """What all ranks measured of a plan; nothing where some had more to do."""
    stretches: list[Behind] = []
    for column in zip(*found, strict=True):
        if len(column) < 2 or not as_much_work(experiment, column):
            continue
        parts = np.stack([own.parts for own in column]).astype(np.float64)
        if own_devices:
            parts *= parts.mean() / parts.mean(axis=(1, 2), keepdims=True)
        stretches += behind(parts)
    return stretches


def behind(parts: NDArray[np.floating]) -> list[Behind]:
    """Of one plan at one number of rows.

    Args:
        parts: [ranks, steps, a power of two]: seconds, the same steps on all ranks.
    """
    ranks, steps, count = parts.shape
    found = []
    often = 1
    while often <= count:
        stretches = parts.reshape(ranks, steps, often, -1).sum(axis=3)
        late = stretches.max(axis=0) - stretches.mean(axis=0)
        usual = float(np.median(late.mean(axis=1)))
        late_s = usual / float(largest(np.array(float(ranks))))
        found.append(Behind(float(stretches.mean()), late_s**2))
        often *= 2
    return found


def unequal(machine: Machine, found: Sequence[Behind]) -> Machine:
    """The machine with what fits best to all stretches; as it is where there are none."""
    lasting = [one for one in found if one.seconds > 0]
    if not lasting:
        return machine
    terms = np.array([(one.seconds**2, one.seconds) for one in lasting])
    squared = np.array([max(one.squared, _NOTHING) for one in lasting])
    uneven, jitter = costs(terms, squared).tolist()
    return machine.replace(unevenness=uneven**0.5, jitter_s=jitter)
