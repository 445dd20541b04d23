"""Measuring what a call allocates."""

from collections.abc import Callable
from typing import Any

import pytest
from torch.profiler import ProfilerActivity, profile


@pytest.fixture
def allocated() -> Callable[[Callable[[], Any]], int]:
    """`allocated(call)` -> bytes of all tensors that the call allocates."""

    def measure(call: Callable[[], Any]) -> int:
        with profile(
            activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True
        ) as profiler:
            call()
        return sum(max(event.self_cpu_memory_usage, 0) for event in profiler.events())

    return measure
