"""What there is in the system while emulated hosts are up."""

import weakref
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from workbench.hosts.devices import assign, divide
from workbench.hosts.emulated import network, tags
from workbench.hosts.emulated.link import Link
from workbench.hosts.emulated.quota import Controller
from workbench.hosts.host import Host, probe
from workbench.store.device import Device


class Emulation:
    """The hosts' network and control groups; what processes that died left of theirs is removed.

    Args:
        names: of the hosts.
        speeds: of each host, the part of its cores' time that it gets.
        link: of each host to the switch.

    Attributes:
        parts: the cores of each host.
        devices: what one engine would compute on if it had a host for itself.
        network: the hosts' addresses and namespaces.
        groups: of each host, the file that takes a process into its control group.
        end: removes all of it and ends what runs in it. Called also when the last reference goes,
            and before the interpreter does.

    Raises:
        HostsError: the system refused; nothing is left.
    """

    def __init__(self, names: Sequence[str], speeds: Sequence[float], link: Link) -> None:
        self.parts: tuple[Host, ...] = divide(probe(), names)
        self.devices: tuple[Device, ...] = tuple(assign(1, part)[0] for part in self.parts)
        controller = Controller.find()
        with tags.alone():
            network.recover()
            controller.recover()
            tag = tags.new([*network.names(), *controller.names()])
            self.end = weakref.finalize(self, _remove, tag, controller)
            try:
                self.network = network.make(tag, len(names), link)
                self.groups: tuple[Path, ...] = tuple(
                    # A thread keeps a core busy, so there are as many cores' worth of time.
                    controller.make(tag, index, None if speed == 1 else speed * device.threads)
                    for index, (speed, device) in enumerate(zip(speeds, self.devices, strict=True))
                )
            except BaseException:
                self.end()
                raise


def _remove(tag: str, controller: Controller) -> None:
    with ExitStack() as stack:  # also where something runs on and its group cannot be removed
        stack.callback(network.remove, tag)
        controller.remove(tag)
