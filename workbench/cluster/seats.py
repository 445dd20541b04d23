"""A seat for each rank of one attempt, in the store that the keeper holds for all."""

from collections.abc import Sequence

from workbench.cluster.devices import Device
from workbench.plan.seat import Seat


def seats(devices: Sequence[Device], meeting: str, prefix: str, timeout_s: float) -> list[Seat]:
    """Seats for the ranks of one world, one for each device.

    Args:
        devices: what each rank computes on.
        meeting: "address:port" of the keeper's store.
        prefix: new for every world.
        timeout_s: how long a rank waits for the others.
    """
    address, _, port = meeting.rpartition(":")
    return [
        Seat(
            rank=rank,
            world_size=len(devices),
            address=address,
            port=int(port),
            prefix=prefix,
            timeout_s=timeout_s,
            device="cuda:0" if device.kind == "cuda" else "cpu",
            threads=device.threads,
            host=device.host,
        )
        for rank, device in enumerate(devices)
    ]
