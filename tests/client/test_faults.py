"""Engines that die, stop or become slow on purpose."""

import subprocess
import sys
import time

import psutil
import pytest

from workbench.client.faults import Faults
from workbench.client.throttling import processor_s
from workbench.store.errors import ClusterError
from workbench.store.process import ProcessIdentity

BUSY = "while True: pass"


@pytest.fixture
def busy():
    process = subprocess.Popen([sys.executable, "-c", BUSY])
    yield process
    process.kill()
    process.wait()


def status(process):
    return psutil.Process(process.pid).status()


def until(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def ignored(_engine, _is_paused):
    pass


def test_an_engine_pauses_goes_on_and_dies(busy):
    told = []
    process = ProcessIdentity.of(busy.pid)
    faults = Faults(lambda engine: process, lambda *expected: told.append(expected))
    faults.pause(0)
    until(lambda: status(busy) == psutil.STATUS_STOPPED)
    faults.unpause(0)
    until(lambda: status(busy) != psutil.STATUS_STOPPED)
    assert told == [(0, True), (0, False)]
    faults.kill(0)
    assert busy.wait() == -9
    with pytest.raises(ClusterError, match="engine 0 has ended"):
        faults.pause(0)


def test_a_slow_engine_is_held_as_it_computes(busy):
    faults = Faults(lambda engine: ProcessIdentity.of(busy.pid), ignored)
    faults.slow(0, 4.0)
    began, ran = time.monotonic(), processor_s(busy.pid)
    until(lambda: time.monotonic() - began > 0.7)
    passed, ran = time.monotonic() - began, processor_s(busy.pid) - ran
    assert faults.slowed[0] == pytest.approx(4.0, rel=0.2)
    assert ran <= passed / 4 * 1.3
    faults.slow(0, 1.0)
    assert faults.slowed == {}
    until(lambda: status(busy) != psutil.STATUS_STOPPED)


def test_an_engine_that_waits_is_not_held():
    idle = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    faults = Faults(lambda engine: ProcessIdentity.of(idle.pid), ignored)
    until(lambda: status(idle) == psutil.STATUS_SLEEPING)
    faults.slow(0, 10.0)
    for _ in range(20):
        assert status(idle) != psutil.STATUS_STOPPED
        time.sleep(0.005)
    assert faults.slowed == {0: 1.0}
    faults.mend()
    idle.communicate(b"\n")


def test_slowing_ends_with_its_process(busy):
    faults = Faults(lambda engine: ProcessIdentity.of(busy.pid), ignored)
    faults.slow(0, 2.0)
    throttle = faults._throttles[0]
    busy.kill()
    busy.wait()
    until(lambda: throttle.is_over)
    faults.mend()


@pytest.mark.parametrize("factor", [0.5, 0, float("nan"), float("inf")])
def test_a_factor_is_one_or_more(factor):
    with pytest.raises(ValueError, match="1 or more times slower"):
        Faults(lambda engine: 1, ignored).slow(0, factor)
