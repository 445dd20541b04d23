"""Where ranks meet: one store, hosted by the notebook's process."""

import itertools
import socket
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

from workbench.cluster.devices import Device
from workbench.train.session import Seat


class Rendezvous:
    """A store on a free port, and a new room in it for every job.

    Args:
        address: of the interface on which the store listens.
        timeout_s: how long a rank waits for the others.
    """

    def __init__(self, address: str, timeout_s: float) -> None:
        self.address, self.timeout_s = address, timeout_s
        # The port is bound here and handed over open, so nobody can take it in between; and
        # left to itself the store would listen on all interfaces.
        listener = socket.create_server((address, 0))
        self.port: int = listener.getsockname()[1]
        self._store = dist.TCPStore(  # type: ignore[attr-defined]  # torch's stubs lack it
            address,
            self.port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
            timeout=timedelta(seconds=timeout_s),
        )
        self._jobs = itertools.count()

    def seats(self, devices: Sequence[Device]) -> list[Seat]:
        """Seats for one job's ranks, one for each device."""
        prefix = f"job-{next(self._jobs)}"
        return [
            Seat(
                rank=rank,
                world_size=len(devices),
                address=self.address,
                port=self.port,
                prefix=prefix,
                timeout_s=self.timeout_s,
                device="cuda:0" if device.kind == "cuda" else "cpu",
                threads=device.threads,
            )
            for rank, device in enumerate(devices)
        ]
