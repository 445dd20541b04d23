"""Devices that a step is faster without: of several plans, that with the shortest step.

Only a plan over fewer ranks is without a device, and it has the first ones: so slow devices are
left out where they come last. Equal neighbours are left out together or not at all.

Source: ours; that a device which costs more than it helps gets nothing is FuPerMod's.
"""

from collections.abc import Callable, Sequence

from workbench.plan.device import Device
from workbench.plan.errors import ExperimentError, MachineError, PlanError
from workbench.plan.machine import Machine
from workbench.predict.balance.sharing import Shared, Sharing
from workbench.predict.prediction import predict


def quickest(
    whole: Sharing, fewer: Callable[[int], Sharing], machine: Machine
) -> tuple[Shared, tuple[str, ...]]:
    """(shares over those ranks that make the shortest step, what is to be said of the others).

    Args:
        whole: what is wanted, over all ranks.
        fewer: the same over so many of the first ranks.
        machine: with the links.

    Raises:
        PlanError: the work cannot be shared out over all ranks.
    """
    devices, best = whole.times.devices, whole.found()
    world = len(devices)
    if not (counts := _counts(whole)):
        return best, ()
    least_s = everybody_s = _step_s(whole, best, machine)
    for count in counts:
        try:
            sharing = fewer(count)
            found = sharing.found()
            step_s = _step_s(sharing, found, machine)
        except (PlanError, ExperimentError, MachineError):
            continue  # it has no room there, or cannot run so
        if step_s < least_s:
            best, least_s = found, step_s
    if (used := best.plan.world_size) == world:
        return best, ()
    named = f"rank {used} is" if used == world - 1 else f"ranks {used} to {world - 1} are"
    return best, (
        f"{named} left out: a step is predicted to take {least_s:.3g} s without, and "
        f"{everybody_s:.3g} s with",
    )


def _counts(whole: Sharing) -> list[int]:
    """Ranks behind which a slower device comes, where a plan over fewer ranks can be made."""
    plan, devices = whole.times.plan, whole.times.devices
    if whole.split == "rows" and any(own.group_size > 1 for own in plan.layers.values()):
        return []
    alone = whole.times.alone()
    return [
        n
        for n in range(1, len(devices))
        if devices[n] != devices[n - 1] and alone[n] > alone[n - 1]
    ]


def _step_s(sharing: Sharing, found: Shared, machine: Machine) -> float:
    """Seconds of a step, communication and waiting included."""
    devices: Sequence[Device] = sharing.times.devices
    own = machine.replace(devices=tuple(devices))
    return predict(found.plan, own, sharing.times.experiment).step_time
