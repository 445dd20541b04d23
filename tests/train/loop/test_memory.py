import mmap
import os
import subprocess
import sys
import threading

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from workbench.train.run.memory import PeakMeter, Reading, rss_bytes, tensor_bytes

CPU = torch.device("cpu")
KB = 1024


def block(kilobytes):
    return torch.empty(kilobytes * KB, dtype=torch.uint8)


def test_peak_and_live_of_known_allocations():
    with PeakMeter(CPU) as meter:
        a = block(100)
        b = block(50)
        view = a.view(10, -1)[2:]  # no bytes of its own
        del b  # 100
        c = block(30)  # 130, below the 150 before
        del a  # held by the view
    assert meter.reading.peak_bytes == 150 * KB
    assert meter.reading.live_bytes == 130 * KB
    assert tensor_bytes([view, c]) == 130 * KB


def test_baseline_is_the_level_that_it_starts_from():
    before = block(7)
    with PeakMeter(CPU, baseline_bytes=tensor_bytes([before])) as meter:
        block(5)
    assert meter.reading.peak_bytes == 12 * KB
    assert meter.reading.live_bytes == 7 * KB


def test_laps_forget_nothing():
    meter = PeakMeter(CPU)
    meter.start()
    a = block(100)
    assert meter.lap().live_bytes == 100 * KB
    b = block(10)
    del a  # allocated a window ago
    assert meter.lap().peak_bytes == 110 * KB
    c = block(20)
    last = meter.stop()
    assert (last.peak_bytes, last.live_bytes) == (30 * KB, 30 * KB)
    assert tensor_bytes([b, c]) == last.live_bytes


def test_temporaries_inside_an_operator_count():
    x = torch.zeros(1000, 1000)
    with PeakMeter(CPU) as meter:
        y = torch.logsumexp(x, dim=1)  # exp(x - max) has x's size
    assert meter.reading.live_bytes == tensor_bytes([y])
    assert meter.reading.peak_bytes >= tensor_bytes([x])


class Slow(torch.autograd.Function):
    """An identity whose backward allocates."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        block(300)
        return grad


def test_allocations_of_backward_count():
    x = torch.ones(1, requires_grad=True)
    with PeakMeter(CPU) as meter:
        Slow.apply(x).backward()
    assert meter.reading.peak_bytes >= 300 * KB


def test_allocations_of_communication_threads_count(tmp_path):
    dist.init_process_group("gloo", f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        x, pieces = block(64), [torch.empty(64 * KB, dtype=torch.uint8)]
        with PeakMeter(CPU) as meter:
            dist.all_gather(pieces, x, async_op=True).wait()  # flattens on gloo's own thread
    finally:
        dist.destroy_process_group()
    assert meter.reading.peak_bytes == 64 * KB


def test_a_training_step_by_hand():
    """fp64, 1x1 convolution and linear: kernels that need no workspace."""
    model = nn.Sequential(
        nn.Conv2d(4, 64, 1), nn.ReLU(), nn.Flatten(), nn.Linear(64 * 256, 8, bias=False)
    ).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)
    x, labels = torch.randn(32, 4, 16, 16, dtype=torch.float64), torch.zeros(32, dtype=torch.long)
    weights = tensor_bytes(model.parameters())
    activation = 32 * 64 * 256 * 8

    def step():
        optimizer.zero_grad()
        F.cross_entropy(model(x), labels).backward()
        optimizer.step()

    meter = PeakMeter(CPU, baseline_bytes=tensor_bytes([*model.parameters(), x, labels]))
    meter.start()
    step()
    meter.lap()
    step()
    second = meter.stop()
    held = 3 * weights + tensor_bytes([x, labels])  # with gradients and momentum
    assert second.live_bytes == pytest.approx(held, rel=0, abs=200)  # `step` and the last loss
    # Highest in backward, at the ReLU: its output, the gradient of that and of its input (the
    # convolution's output, freed in forward, is not among them), beside all but the
    # convolution's small gradients.
    by_hand = held + 3 * activation
    assert second.peak_bytes == pytest.approx(by_hand, rel=0.01)


def test_storages_are_counted_once_and_whole():
    a = torch.zeros(10)
    tied = nn.Parameter(a)
    assert tensor_bytes([a, tied, a[3:], a.view(2, 5)]) == 40
    assert tensor_bytes([torch.empty(0), torch.empty(0, 5)]) == 0
    assert tensor_bytes([a, a.clone()]) == 80


def test_an_error_inside_leaves_no_meter_on():
    with pytest.raises(ZeroDivisionError), PeakMeter(CPU):
        raise ZeroDivisionError
    with PeakMeter(CPU) as meter:
        block(1)
    assert meter.reading.peak_bytes == KB


def test_a_meter_starts_where_an_interrupt_left_another_one_on():
    PeakMeter(CPU).start()
    with PeakMeter(CPU) as meter:
        kept = torch.empty(1000)
    assert meter.reading == Reading(4000, kept.nbytes)


def interrupted(meter):
    meter.stop()
    raise KeyboardInterrupt


def test_an_interrupt_between_two_windows_is_what_comes_out():
    with pytest.raises(KeyboardInterrupt), PeakMeter(CPU) as meter:
        interrupted(meter)


def test_profilers_work_again_after_a_meter():
    with PeakMeter(CPU):
        pass
    with torch.autograd.profiler.profile() as profile:
        torch.zeros(3).exp()
    assert "aten::exp" in {event.name for event in profile.function_events}


def test_meters_of_two_threads_do_not_disturb_each_other():
    readings, both = {}, threading.Barrier(2)

    def measure(kilobytes):
        with PeakMeter(CPU) as meter:
            both.wait(timeout=10)
            block(kilobytes)
            both.wait(timeout=10)
        readings[kilobytes] = meter.reading.peak_bytes

    threads = [threading.Thread(target=measure, args=(size,)) for size in (10, 20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert readings == {10: 10 * KB, 20: 20 * KB}


QUIET = """
import torch
from workbench.train.run.memory import PeakMeter
early = torch.empty(10)
with PeakMeter(torch.device("cpu")) as meter:
    del early
    torch.randn(3, requires_grad=True).sum().backward()
"""


@pytest.mark.slow
def test_nothing_is_written_to_stderr():
    environment = os.environ | {"TORCH_CPP_LOG_LEVEL": "ERROR"}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", QUIET],
        capture_output=True,
        text=True,
        env=environment,
        check=True,
    )
    assert done.stderr == done.stdout == ""


def test_resident_memory_covers_what_is_touched():
    memory = mmap.mmap(-1, 64 << 20)  # new to this process, as what torch allocates need not be
    before = rss_bytes()
    touched = torch.frombuffer(memory, dtype=torch.uint8).fill_(1)
    assert rss_bytes() - before > 0.9 * tensor_bytes([touched])
