"""The job server's host: what it has left, what passes through its network, how its GPUs are."""

import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import psutil


class Gpus:
    """Memory in use on this host's GPUs."""

    def __init__(self) -> None:
        self._library: Any = None
        with suppress(Exception):  # no driver, or no GPU: there is nothing to say
            import pynvml

            pynvml.nvmlInit()
            self._library = pynvml

    def bytes_of(self, gpu: str) -> int:
        """Memory that is in use on a GPU.

        Args:
            gpu: its number or UUID; "" for none.
        """
        if self._library is None or not gpu:
            return 0
        with suppress(Exception):  # it fell off the bus, or is somebody else's
            by_index, by_uuid = (
                self._library.nvmlDeviceGetHandleByIndex,
                self._library.nvmlDeviceGetHandleByUUID,
            )
            handle = by_index(int(gpu)) if gpu.isdecimal() else by_uuid(gpu)
            return int(self._library.nvmlDeviceGetMemoryInfo(handle).used)
        return 0


@dataclass
class HostHealth:
    """Looks at the host again and again; rates are those since the last look."""

    _at: float | None = None
    _traffic: dict[str, tuple[int, int]] = field(default_factory=dict)

    def look(self, now: float) -> dict[str, object]:
        """Processor, memory and network, as plain values.

        Args:
            now: a monotonic clock's seconds.

        Returns:
            time: seconds since the epoch; cpu_share: of all cores; free_bytes and bytes: of
            memory; network: by interface, bytes received and sent in a second ({} at first).
        """
        memory = psutil.virtual_memory()
        return {
            "time": time.time(),
            "cpu_share": psutil.cpu_percent() / 100,
            "free_bytes": memory.available,
            "bytes": memory.total,
            "network": self._rates(now),
        }

    def _rates(self, now: float) -> dict[str, tuple[float, float]]:
        counters = psutil.net_io_counters(pernic=True)
        traffic = {name: (each.bytes_recv, each.bytes_sent) for name, each in counters.items()}
        before, passed = self._traffic, now - (now if self._at is None else self._at)
        self._at, self._traffic = now, traffic
        if passed <= 0:
            return {}
        return {
            # A counter that is smaller than before began anew, as its interface did.
            name: (
                max(received - before[name][0], 0) / passed,
                max(sent - before[name][1], 0) / passed,
            )
            for name, (received, sent) in traffic.items()
            if name in before
        }
