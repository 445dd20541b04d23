"""A place where ranks could meet: somebody listens there, and takes no notice of who comes."""

from collections.abc import Iterator
from contextlib import contextmanager
from socketserver import BaseRequestHandler, TCPServer
from threading import Thread


@contextmanager
def meeting_place() -> Iterator[str]:
    """Its "address:port"."""
    with TCPServer(("127.0.0.1", 0), BaseRequestHandler) as server:
        serving = Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        serving.start()
        address, port = server.server_address
        yield f"{address}:{port}"
        server.shutdown()
        serving.join()
