"""Which engine gets which cores or GPU."""

from collections.abc import Sequence
from dataclasses import dataclass

from workbench.cluster.host import Host
from workbench.plan.placement import apportion


@dataclass(frozen=True)
class Device:
    """What one engine computes on.

    Attributes:
        kind: "cuda" or "cpu".
        host: the host's name.
        name: the GPU's product name, or "cpu".
        cores: logical cores that the engine runs on.
        threads: compute threads of the engine.
        memory_bytes: memory of the GPU, or of the whole host.
        gpu: what `CUDA_VISIBLE_DEVICES` says in the engine; "" for none.
        sharers: engines that have this same GPU, or these same cores; 1: it alone.
    """

    kind: str
    host: str
    name: str
    cores: tuple[int, ...]
    threads: int
    memory_bytes: int
    gpu: str = ""
    sharers: int = 1

    @property
    def backend(self) -> str:
        """The torch.distributed backend for engines like this: nccl wants a GPU for each."""
        return "nccl" if self.kind == "cuda" and self.sharers == 1 else "gloo"

    def __str__(self) -> str:
        shared = f", shared by {self.sharers} engines" if self.sharers > 1 else ""
        if self.kind == "cuda":
            return f"{self.name}{shared}"
        cores = ", ".join(map(str, self.cores))
        return f"core{'s' * (len(self.cores) > 1)} {cores}{shared}"


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
