"""What agents say, made up."""

from workbench.hosts.host import Gpu, Host
from workbench.hosts.remote.reception import Hello, versions

FOUR = ((0,), (1,), (2,), (3,))
GPUS = (Gpu("GPU-a", "H100", 80 << 30), Gpu("GPU-b", "H100", 80 << 30))


def hello(
    host: str,
    slot: int | None = None,
    port: int = 0,
    cores: tuple[tuple[int, ...], ...] = FOUR,
    gpus: tuple[Gpu, ...] = (),
) -> Hello:
    return Hello(
        host=Host(host, cores, memory_bytes=8 << 30, gpus=gpus),
        slot=slot,
        address=f"address of {host}",
        port=port,
        interface=f"ib-{host}",
        versions=versions(),
        ends_at=None,
    )
