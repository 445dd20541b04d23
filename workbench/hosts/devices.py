"""Which engine gets which cores or GPU, and what each rank of an attempt is told of it."""

from collections.abc import Sequence

from workbench.hosts.host import Host
from workbench.plan.placement import apportion
from workbench.plan.seat import Seat
from workbench.store.device import Device


def assign(num_engines: int, host: Host) -> tuple[Device, ...]:
    """One device for each engine.

    GPUs go round; several engines on one is said, and makes them talk through gloo. Cores are
    handed out whole and disjoint, neighbours together. Where there are fewer cores than
    engines they go round as well. Under a container's quota nobody knows which cores its
    neighbours use, so engines are not pinned there, only their threads are counted.
    """
    if num_engines < 1:
        raise ValueError(f"a cluster has at least one engine, got {num_engines}")
    devices = []
    for engine, (cores, threads, core_sharers) in enumerate(_parts(num_engines, host)):
        own = tuple(core for group in cores for core in group)
        if host.gpus:
            gpu = host.gpus[engine % len(host.gpus)]
            sharers = len(range(engine % len(host.gpus), num_engines, len(host.gpus)))
            kind, name, memory, token = "cuda", gpu.name, gpu.memory_bytes, gpu.token
        else:
            sharers, kind, name, memory, token = core_sharers, "cpu", "cpu", host.memory_bytes, ""
        devices.append(Device(kind, host.name, name, own, threads, memory, token, sharers))
    return tuple(devices)


def divide(host: Host, names: Sequence[str]) -> tuple[Host, ...]:
    """Equal parts of a host's cores as hosts of these names, without GPUs.

    Where there are fewer cores than parts, and under a container's quota, parts have the same.
    """
    parts = _parts(len(names), host)
    limited = host.quota if host.quota is None else host.quota / len(names)
    return tuple(
        Host(name, cores, None if len(cores) < len(host.cores) else limited, host.memory_bytes)
        for name, (cores, _threads, _sharers) in zip(names, parts, strict=True)
    )


def whole_host(host: Host) -> Device:
    """All cores and no GPU: for what is done once, for all ranks."""
    cores = tuple(sorted(core for group in host.cores for core in group))
    threads = len(host.cores) if host.quota is None else min(len(host.cores), int(host.quota))
    return Device("cpu", host.name, "cpu", cores, max(1, threads), host.memory_bytes)


def _parts(count: int, host: Host) -> list[tuple[tuple[tuple[int, ...], ...], int, int]]:
    """(physical cores, threads, parts that have the same) for each of `count` parts."""
    cores = host.cores
    if host.quota is not None and host.quota < sum(map(len, cores)):
        return [(cores, max(1, int(host.quota) // count), count)] * count
    if count > len(cores):
        on = [part % len(cores) for part in range(count)]
        return [((cores[core],), 1, on.count(core)) for core in on]
    parts, start = [], 0
    for size in apportion(len(cores), (1,) * count):
        parts.append((cores[start : start + size], size, 1))
        start += size
    return parts


def seats(devices: Sequence[Device], meeting: str, prefix: str, timeout_s: float) -> list[Seat]:
    """Seats for the ranks of one world, one for each device.

    Args:
        devices: what each rank computes on.
        meeting: "address:port" of the supervisor's store.
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
