"""Where ranks meet: one store for all jobs, which none of them takes along when it ends."""

import socket
from datetime import timedelta


class Meeting:
    """torch's store, on a free port of one interface.

    Args:
        address: of the interface.
        timeout_s: how long it waits for a value.

    Attributes:
        place: "address:port".
    """

    def __init__(self, address: str, timeout_s: float) -> None:
        import torch.distributed as dist  # here: it takes seconds, in which engines start

        # The port is bound here and handed over open, so nobody can take it in between; and
        # left to itself the store would listen on all interfaces.
        listener = socket.create_server((address, 0))
        port: int = listener.getsockname()[1]
        self.place = f"{address}:{port}"
        self._store = dist.TCPStore(  # type: ignore[attr-defined]  # torch's stubs lack it
            address,
            port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
            timeout=timedelta(seconds=timeout_s),
        )
