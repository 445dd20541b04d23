"""The same experiment elsewhere: more ranks, other devices, other links."""

from workbench.plan.device import Device
from workbench.plan.errors import ExperimentError, MachineError
from workbench.plan.experiment import Experiment
from workbench.plan.link import Link
from workbench.plan.machine import Machine

MOST_RANKS = 65_536


def changed(experiment: Experiment, world_size: int | None, batch_size: int | None) -> Experiment:
    """The experiment on another number of ranks, or with another batch.

    Raises:
        PlanError: a group size of the plan does not divide the number of ranks.
        ExperimentError: more than 65,536 ranks, or a batch that cannot be.
    """
    plan = experiment.plan
    if world_size is not None:
        if isinstance(world_size, bool) or not isinstance(world_size, int) or world_size < 1:
            raise ExperimentError(f"world_size must be a positive integer, got {world_size!r}")
        if world_size > MOST_RANKS:
            raise ExperimentError(f"at most {MOST_RANKS:,} ranks are predicted, got {world_size:,}")
        plan = plan.with_world_size(world_size)
    batch = experiment.batch_size if batch_size is None else batch_size
    return experiment.replace(plan=plan, batch_size=batch)


def elsewhere(machine: Machine, link: Link | str | None, device: Device | str | None) -> Machine:
    """The machine with another link, or with another device on all ranks.

    Args:
        machine: as it is.
        link: between its hosts, where there are several, and else between its ranks; or the name
            of a known machine, whose link it is.
        device: of all ranks; or the name of a known machine, whose device it is.

    Raises:
        MachineError: no known machine of this name, or something else than these.
    """
    fields: dict[str, object] = {}
    if link is not None:
        where = "within" if machine.ranks_per_host is None else "across"
        fields[where] = _link(link, where)
    if device is not None:
        fields["devices"] = (_device(device),)
    return machine.replace(**fields) if fields else machine


def _link(link: Link | str, where: str) -> Link:
    if isinstance(link, str):
        known = Machine.preset(link)
        return known.across or known.within if where == "across" else known.within
    if not isinstance(link, Link):
        raise MachineError(f"link must be a Link or the name of a known machine, got {link!r}")
    return link


def _device(device: Device | str) -> Device:
    if isinstance(device, str):
        return Machine.preset(device).devices[0]
    if not isinstance(device, Device):
        raise MachineError(f"device must be a Device or a known machine's name, got {device!r}")
    return device
