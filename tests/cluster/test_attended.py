"""Rows on their way: few messages, small ones, none lost."""

import itertools
import random
import threading

import pytest

from tests.cluster.fake_session import row
from workbench.cluster.attended import Receiver, Telemetry

NEVER_S = 3600.0


class Published:
    """What arrives at ipyparallel's client: the values of all messages, by key."""

    def __init__(self) -> None:
        self.messages: list[dict[str, bytes]] = []
        self.arrived = threading.Event()

    def __call__(self, message: dict[str, bytes]) -> None:
        self.messages.append(message)
        self.arrived.set()

    def merged(self) -> dict[str, bytes]:
        return {key: value for message in self.messages for key, value in message.items()}


def test_rows_that_were_never_published_come_with_the_answer():
    published = Published()
    telemetry = Telemetry(published, NEVER_S)
    rows = [row(step, 1) for step in range(3)]
    for each in rows:
        telemetry.emit(each)
    first, packed = telemetry.close()
    assert (published.messages, first) == ([], 0)
    assert Receiver().finish(first, packed) == rows


def test_a_thread_publishes_while_the_rank_goes_on():
    published = Published()
    telemetry = Telemetry(published, period_s=0.001)
    telemetry.emit(row(0, 0))
    assert published.arrived.wait(10)
    telemetry.emit(row(1, 0))
    receiver = Receiver()
    received = receiver.finish(*telemetry.close()) + receiver.take(published.merged())
    received += receiver.take({})
    assert [r["step"] for r in received] == [0, 1]
    assert not receiver.has_gap


def test_many_rows_make_several_small_messages():
    published = Published()
    telemetry = Telemetry(published, NEVER_S)
    for step in range(5000):
        telemetry.emit(row(step, 0))
    first, packed = telemetry.close()
    sizes = [len(value) for message in published.messages for value in message.values()]
    assert max(sizes) <= 60 << 10
    assert len(packed) <= 15 << 10
    receiver = Receiver()
    received = receiver.take(published.merged()) + receiver.finish(first, packed)
    assert [r["step"] for r in received] == list(range(5000))


def test_messages_may_arrive_in_any_order_and_rows_do_not():
    published = Published()
    telemetry = Telemetry(published, NEVER_S)
    for step in range(5000):
        telemetry.emit(row(step, 0))
    last = telemetry.close()
    messages = [*published.messages]
    random.Random(0).shuffle(messages)
    receiver = Receiver()
    received = list(itertools.chain(*(receiver.take(dict(message)) for message in messages)))
    received += receiver.finish(*last)
    assert [r["step"] for r in received] == list(range(5000))


def test_a_message_that_was_not_sent_is_sent_again():
    published = Published()
    failures = iter([OSError("busy")])

    def publish(message: dict[str, bytes]) -> None:
        for failure in failures:
            raise failure
        published(message)

    telemetry = Telemetry(publish, period_s=0.001)
    telemetry.emit(row(0, 0))
    assert published.arrived.wait(10)
    first, packed = telemetry.close()
    assert (first, packed) == (1, b"")
    assert [r["step"] for r in Receiver().take(published.merged())] == [0]


def test_a_lost_message_is_noticed_and_what_follows_is_not_mixed_up():
    published = Published()
    telemetry = Telemetry(published, NEVER_S)
    for step in range(5000):
        telemetry.emit(row(step, 0))
    last = telemetry.close()
    receiver = Receiver()
    received = [*receiver.take(dict(published.messages[0]))]
    for message in published.messages[2:]:
        received += receiver.take(dict(message))
    received += receiver.finish(*last)
    assert [r["step"] for r in received] == list(range(len(received)))
    assert receiver.has_gap


def test_taken_messages_are_removed_and_foreign_ones_left():
    data = {"rows/0": b"", "other": b"x"}
    Receiver().take(data)
    assert data == {"other": b"x"}


def test_counts_are_whole_numbers_again():
    telemetry = Telemetry(Published(), NEVER_S)
    telemetry.emit({**row(3, 1), "peak_bytes": 123_456_789_012.0, "loss": 2.5})
    (received,) = Receiver().finish(*telemetry.close())
    assert (repr(received["step"]), repr(received["peak_bytes"])) == ("3", "123456789012")
    assert repr(received["loss"]) == "2.5"


@pytest.mark.parametrize("change", [{"lossy": 1.0}, {"loss": None}])
def test_a_row_has_exactly_the_columns(change):
    telemetry = Telemetry(Published(), NEVER_S)
    wrong = {k: v for k, v in {**row(0, 0), **change}.items() if v is not None}
    with pytest.raises(ValueError, match="a row has the columns"):
        telemetry.emit(wrong)
    telemetry.close()
