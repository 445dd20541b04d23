"""What tensors take on this rank, now and at the highest point, and one row of metrics a step."""

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import psutil
import torch
from torch import Tensor
from torch._C._autograd import (
    _disable_profiler_legacy,
    _enable_profiler_legacy,
    _enable_record_function,
    _profiler_type,
)
from torch._C._profiler import (
    ActiveProfilerType,
    ProfilerConfig,
    ProfilerState,
    _ExperimentalConfig,
)

from workbench.plan.experiment.metrics import Row


@dataclass(frozen=True)
class Reading:
    """What a `PeakMeter` saw over one window."""

    peak_bytes: int
    live_bytes: int


@dataclass(frozen=True)
class Held:
    """What stays alive on a rank from step to step.

    Attributes:
        gradients: the gradients, with the buckets that they travel in; those of earlier steps too,
            if any wait.
    """

    weights: tuple[Tensor, ...]
    gradients: tuple[Tensor, ...]
    optimizer: tuple[Tensor, ...]

    def __iter__(self) -> Iterator[Tensor]:
        yield from self.weights
        yield from self.gradients
        yield from self.optimizer


class PeakMeter:
    """Follows every tensor allocation and release of this rank, from `start` to `stop`.

        meter.start()             with PeakMeter(torch.device("cpu")) as meter:
        first = meter.lap()           ...
        last = meter.stop()       meter.reading.peak_bytes

    On CPU it records torch's allocator events: those of the thread that starts it and of the
    threads of torch that work for it (autograd's, gloo's), not those of other Python threads.
    That costs 2 to 4 µs for each event (VGG-11 has some 300 a step), so it can stay on. Memory
    that is no tensor's own (memory-mapped files, numpy arrays, gloo's buffers, memory that ranks
    share) is not counted, unless `add` says how much.
    On a GPU the caching allocator's own counter is read.

    The allocator knows only sizes of what was allocated under a meter; hence

    1. tensors alive at `start` are stated as `baseline_bytes` (CPU only);
    2. those of them that are freed while the meter runs are counted to the end, and torch
       warns once on stderr, unless the process has TORCH_CPP_LOG_LEVEL=ERROR;
    3. `lap` closes one window and opens the next with nothing forgotten: metered from a
       rank's first tensor on, windows are exact, except that a thread of gloo may drop the
       last reference to a buffer unseen, which then counts until the level is set anew.

    Start, lap and stop it on the same thread; one meter a thread at a time.

    Args:
        baseline_bytes: what is alive at `start`, as `tensor_bytes` counts it.
    """

    reading: Reading

    def __init__(self, device: torch.device, *, baseline_bytes: int = 0) -> None:
        self.device = device
        self._level_bytes = baseline_bytes

    def start(self) -> None:
        """Opens the first window.

        What an earlier meter of this thread left open is closed: an interrupt may come at any
        moment, also when that meter was about to be stopped, and the rank has other work now.
        """
        if self.device.type == "cuda":
            torch.cuda.init()  # the allocator refuses to be asked before
            torch.cuda.reset_peak_memory_stats(self.device)
            return
        _close()
        # Not `torch.profiler`: kineto writes two lines to stderr for each window, and takes ten
        # times as long because it cannot leave out the operators.
        config = (ProfilerState.CPU, False, True, False, False, False, _ExperimentalConfig())
        _enable_profiler_legacy(ProfilerConfig(*config))
        _enable_record_function(False)  # memory events alone

    def stop(self) -> Reading:
        if self.device.type == "cuda":
            self.reading = Reading(
                torch.cuda.max_memory_allocated(self.device),
                torch.cuda.memory_allocated(self.device),
            )
            return self.reading
        _enable_record_function(True)
        threads = _disable_profiler_legacy()
        events = [event for thread in threads for event in thread]  # in order for each thread
        origin = events[0]
        changes = [
            (origin.cpu_elapsed_us(event), event.cpu_memory_usage())
            for event in events
            if event.cpu_memory_usage()
        ]
        peak = level = self._level_bytes
        for _, size_bytes in sorted(changes, key=lambda change: change[0]):
            level += size_bytes
            peak = max(peak, level)
        self._level_bytes = level
        self.reading = Reading(peak, level)
        return self.reading

    def add(self, held_bytes: int) -> None:
        """Counts, from this window on, memory of tensors that no allocator sees (CPU only)."""
        self._level_bytes += held_bytes

    def lap(self, *, live_bytes: int | None = None) -> Reading:
        """Closes the window and opens the next.

        Args:
            live_bytes: what is alive now, where the caller knows (`tensor_bytes`); it replaces what
                the events add up to, so that releases by other threads, which no event tells of,
                cannot add up over many windows.
        """
        reading = self.stop()
        if live_bytes is not None and self.device.type != "cuda":
            self._level_bytes = live_bytes
            reading = self.reading = Reading(reading.peak_bytes, live_bytes)
        self.start()
        return reading

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self.stop()
        else:  # between two windows, perhaps; and nobody will read it
            _close()


def _close() -> None:
    """Ends the window that is open on this thread, if one is; of CPU memory."""
    if _profiler_type() == ActiveProfilerType.LEGACY:
        _enable_record_function(True)
        _disable_profiler_legacy()


def tensor_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the storages behind `tensors`, each storage counted once and whole."""
    storages = (tensor.untyped_storage() for tensor in tensors)
    return sum({(s.device, s.data_ptr()): s.nbytes() for s in storages}.values())


def rss_bytes() -> int:
    return int(psutil.Process().memory_info().rss)


def step_row(
    *,
    step: int,
    rank: int,
    loss: float,
    samples: int,
    seconds: float,
    blocked_s: tuple[float, ...],
    meter: PeakMeter,
    received_bytes: int,
    held: Held,
    beside_bytes: int,
    device: torch.device,
) -> Row:
    """The row of one step.

    Args:
        blocked_s: seconds that each rank of the world was blocked in collectives.
        beside_bytes: the bytes of memory that stays too and is no tensor's (staging, sums on their
            way).
    """
    held_bytes = tensor_bytes(held)
    memory = meter.lap(live_bytes=held_bytes + beside_bytes)
    blocked, least = blocked_s[rank], min(blocked_s)
    on_gpu = device.type == "cuda"
    return {
        "step": step,
        "rank": rank,
        "time": time.time(),
        "loss": loss,
        "samples_per_s": samples / seconds,
        "compute_s": max(seconds - blocked, 0.0),
        "communication_s": least,
        "wait_s": blocked - least,
        "received_bytes": received_bytes,
        "tensor_bytes": held_bytes,
        "weight_bytes": tensor_bytes(held.weights),
        "optimizer_bytes": tensor_bytes(held.optimizer),
        "staging_bytes": beside_bytes,
        "peak_bytes": memory.peak_bytes,
        "rss_bytes": rss_bytes(),
        "gpu_bytes": torch.cuda.memory_allocated(device) if on_gpu else 0,
        "accuracy": float("nan"),
    }
