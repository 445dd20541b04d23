"""One row of metrics for each step and rank."""

import time

import torch

from workbench.plan.metrics import Row
from workbench.train.loop.memory import Held, PeakMeter, rss_bytes, tensor_bytes


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
        step: index of the step.
        rank: this rank.
        loss: mean loss.
        samples: of the global batch.
        seconds: of the whole step.
        blocked_s: seconds that each rank of the world was blocked in collectives.
        meter: of this rank's tensors; one lap is taken.
        received_bytes: in collectives of the step.
        held: what stays alive from step to step; nothing else of the step is.
        beside_bytes: of memory that stays too and is no tensor's (staging, sums on their way).
        device: of this rank.
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
