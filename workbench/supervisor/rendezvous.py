"""Where ranks meet: one store for all jobs, which none of them takes along when it ends."""

import socket
from datetime import timedelta


class Rendezvous:
    """torch's store, on one interface.

    Args:
        address: of the interface.
        timeout_s: how long it waits for a value.
        port: of it; 0: any that is free.

    Attributes:
        place: "address:port".
    """

    def __init__(self, address: str, timeout_s: float, port: int = 0) -> None:
        import torch.distributed as dist  # here: it takes seconds, in which engines start

        # The port is bound here and handed over open, so nobody can take it in between; and
        # left to itself the store would listen on all interfaces.
        listener = socket.create_server((address, port))
        port = listener.getsockname()[1]
        self.place = f"{address}:{port}"
        self._store = dist.TCPStore(  # type: ignore[attr-defined]  # torch's stubs lack it
            address,
            port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
            timeout=timedelta(seconds=timeout_s),
        )
