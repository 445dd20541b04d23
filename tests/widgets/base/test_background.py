"""Of many requests the latest is worked on."""

import threading

from workbench.widgets.base.widget import LatestWorker


def test_requests_in_between_are_skipped():
    begun, go_on, done = threading.Event(), threading.Event(), []

    def work(request):
        begun.set()
        assert go_on.wait(10)
        done.append(request)

    latest = LatestWorker(work, "test", lambda: None)
    latest.ask(0)
    assert begun.wait(10)
    for request in range(1, 5):
        latest.ask(request)
    assert latest.superseded()
    assert not latest.settle(0.01)
    go_on.set()
    assert latest.settle(10)
    assert done == [0, 4]
    latest.close()
    latest.ask(5)
    assert latest.settle(10)
    assert done == [0, 4]


def test_it_rests_once_after_work():
    rested = threading.Semaphore(0)
    latest = LatestWorker(lambda _: None, "test", rested.release, rest_s=0.01)
    latest.ask(1)
    assert rested.acquire(timeout=10)
    assert not rested.acquire(timeout=0.1)
    latest.ask(2)
    assert rested.acquire(timeout=10)
    latest.close()
