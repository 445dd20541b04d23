"""What this host offers to this process, and which engine gets which cores or GPU of it.

Nothing here starts CUDA: a process that did could no longer be given its GPU through
`CUDA_VISIBLE_DEVICES`.
"""

import os
import platform
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path

import psutil
import pynvml

from workbench.plan.placement.placement import apportion
from workbench.store.cluster_spec import EngineDevice


@dataclass(frozen=True)
class Gpu:
    """One GPU that this process may use.

    Attributes:
        token: the value of `CUDA_VISIBLE_DEVICES` with which a process sees just this GPU.
        memory_bytes: the size of its memory, in bytes.
    """

    token: str
    name: str
    memory_bytes: int


@dataclass(frozen=True)
class Host:
    """What one host offers to this process.

    Attributes:
        cores: the physical cores, each with those of its logical ones that this process may use.
        quota: the processors' worth of time that a container grants; None: all of `cores`.
        memory_bytes: the memory that the host, or a container, grants, in bytes.
    """

    name: str
    cores: tuple[tuple[int, ...], ...]
    quota: float | None = None
    memory_bytes: int = 0
    gpus: tuple[Gpu, ...] = ()


def probe() -> Host:
    """Looks at this host, respecting affinity, container limits and `CUDA_VISIBLE_DEVICES`."""
    limit = memory_limit()
    total = int(psutil.virtual_memory().total)
    return Host(
        name=platform.node(),
        cores=physical_cores(_allowed_cores()),
        quota=cpu_quota(),
        memory_bytes=total if limit is None else min(total, limit),
        gpus=visible_gpus(os.environ.get("CUDA_VISIBLE_DEVICES")) if _torch_has_cuda() else (),
    )


def _torch_has_cuda() -> bool:
    """Returns whether torch was built for CUDA, without importing it, which takes seconds."""
    torch = find_spec("torch")
    if torch is None or torch.origin is None:
        return False
    told = spec_from_file_location("torch_version", Path(torch.origin).with_name("version.py"))
    assert told is not None
    assert told.loader is not None
    version = module_from_spec(told)
    told.loader.exec_module(version)
    return bool(version.cuda)


def _allowed_cores() -> tuple[int, ...]:
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def physical_cores(
    logical: tuple[int, ...], system: Path = Path("/sys/devices/system/cpu")
) -> tuple[tuple[int, ...], ...]:
    """Groups logical cores by the physical one they are, in the order of socket and core."""
    groups: dict[tuple[int, int], list[int]] = {}
    for core in logical:
        topology = system / f"cpu{core}" / "topology"
        try:
            socket = int((topology / "physical_package_id").read_text())
            place = (socket, int((topology / "core_id").read_text()))
        except (OSError, ValueError):
            place = (0, core)  # unknown: a core of its own
        groups.setdefault(place, []).append(core)
    return tuple(tuple(groups[place]) for place in sorted(groups))


def cpu_quota(root: Path = Path("/")) -> float | None:
    """Returns the processors' worth of time that control groups grant; None: no limit."""
    limits = []
    for folder in control_groups(root, "cpu"):
        v2, v1 = _words(folder / "cpu.max"), _words(folder / "cpu.cfs_quota_us")
        if len(v2) == 2 and v2[0] != "max":
            limits.append(int(v2[0]) / int(v2[1]))
        elif v1 and int(v1[0]) > 0:
            limits.append(int(v1[0]) / int(_words(folder / "cpu.cfs_period_us")[0]))
    return min(limits, default=None)


def memory_limit(root: Path = Path("/")) -> int | None:
    """Returns the bytes of memory that control groups grant this process; None: no limit."""
    limits = []
    for folder in control_groups(root, "memory"):
        words = _words(folder / "memory.max") or _words(folder / "memory.limit_in_bytes")
        if words and words[0] != "max":
            limits.append(int(words[0]))
    return min(limits, default=None)


def control_groups(root: Path, controller: str) -> Iterator[Path]:
    """Yields the folders of this process' control groups (v1 and v2), and all folders above."""
    mount = root / "sys/fs/cgroup"
    for line in _lines(root / "proc/self/cgroup"):
        _number, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        base = mount / controller if controllers else mount
        folder = base / path.lstrip("/")
        while True:
            yield folder
            if folder == base or base not in folder.parents:
                break
            folder = folder.parent


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def _words(path: Path) -> list[str]:
    return " ".join(_lines(path)).split()


def visible_gpus(visible: str | None) -> tuple[Gpu, ...]:
    """Returns the GPUs that CUDA would show under this value of `CUDA_VISIBLE_DEVICES`.

    Entries are kept as they are written, because what an index means is CUDA's business
    (`CUDA_DEVICE_ORDER`). As in CUDA, the first entry that does not exist ends the list.
    """
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:  # no driver, or no right to ask it: no GPU
        return ()
    try:
        if visible is None:
            handles = map(pynvml.nvmlDeviceGetHandleByIndex, range(pynvml.nvmlDeviceGetCount()))
            return tuple(_gpu(handle, pynvml.nvmlDeviceGetUUID(handle)) for handle in handles)
        found = []
        for token in filter(None, map(str.strip, visible.split(","))):
            try:
                found.append(_gpu(_handle(token), token))
            except (pynvml.NVMLError, ValueError):
                break
        return tuple(found)
    finally:
        pynvml.nvmlShutdown()


def _handle(token: str) -> object:
    if token.startswith(("GPU-", "MIG-")):
        return pynvml.nvmlDeviceGetHandleByUUID(token)
    return pynvml.nvmlDeviceGetHandleByIndex(int(token))


def _gpu(handle: object, token: str) -> Gpu:
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle).total
    return Gpu(token, pynvml.nvmlDeviceGetName(handle), int(memory))


def assign(num_engines: int, host: Host) -> tuple[EngineDevice, ...]:
    """Returns one device for each engine.

    GPUs go round; several engines on one is said, and makes them talk through gloo. Cores are
    handed out whole and disjoint, neighbours together. Where there are fewer cores than
    engines they go round as well. Under a container's quota nobody knows which cores its
    neighbours use, so engines are not pinned there, only their threads are counted.

    Raises:
        ValueError: fewer than one engine is asked for.
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
        devices.append(EngineDevice(kind, host.name, name, own, threads, memory, token, sharers))
    return tuple(devices)


def divide(host: Host, names: Sequence[str]) -> tuple[Host, ...]:
    """Returns equal parts of a host's cores as hosts of these names, without GPUs.

    Where there are fewer cores than parts, and under a container's quota, parts have the same.
    """
    parts = _parts(len(names), host)
    limited = host.quota if host.quota is None else host.quota / len(names)
    return tuple(
        Host(name, cores, None if len(cores) < len(host.cores) else limited, host.memory_bytes)
        for name, (cores, _threads, _sharers) in zip(names, parts, strict=True)
    )


def whole_host(host: Host) -> EngineDevice:
    """Returns all cores and no GPU, for what is done once, for all ranks."""
    cores = tuple(sorted(core for group in host.cores for core in group))
    threads = len(host.cores) if host.quota is None else min(len(host.cores), int(host.quota))
    return EngineDevice("cpu", host.name, "cpu", cores, max(1, threads), host.memory_bytes)


def _parts(count: int, host: Host) -> list[tuple[tuple[tuple[int, ...], ...], int, int]]:
    """Returns (physical cores, threads, parts that have the same) for each of `count` parts."""
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
