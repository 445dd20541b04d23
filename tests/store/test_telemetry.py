"""Rows in files: each once, in order, whoever reads and whenever; half of a row is none."""

import itertools
import os
import threading

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.client.fake_session import row
from workbench.store import telemetry as module
from workbench.store.rank_files import RankFiles
from workbench.store.telemetry import AttemptReader, RowReader, Telemetry

NEVER_S = 3600.0
SMALL_BYTES = 3 * module.ROW_BYTES


def steps(found):
    return [each["step"] for each in found]


def drained(tail: RowReader, most: int = 7):
    """All that there is, a few rows at a time."""
    return list(itertools.chain.from_iterable(iter(lambda: tail.read(most), [])))


@pytest.fixture
def files(tmp_path):
    return RankFiles(tmp_path, 0)


def test_rows_arrive_as_they_were_emitted(files):
    telemetry = Telemetry(files, period_s=NEVER_S)
    emitted = [row(step, 0) for step in range(5)]
    for each in emitted:
        telemetry.emit(each)
    assert telemetry.close() == 0
    tail = RowReader(files)
    assert tail.read() == emitted
    assert tail.read() == []


def test_a_thread_writes_while_the_rank_goes_on(files):
    telemetry = Telemetry(files, period_s=0.001)
    tail, found = RowReader(files), []
    for step in range(3):
        telemetry.emit(row(step, 0))
        while len(found) <= step:  # the thread alone can make this end
            found += tail.read()
    telemetry.close()
    assert steps(found) == [0, 1, 2]


def test_many_rows_make_several_files(files):
    telemetry = Telemetry(files, period_s=NEVER_S, put_aside_bytes=SMALL_BYTES)
    for step in range(3):
        telemetry.emit(row(step, 0))
    telemetry._write()
    telemetry.emit(row(3, 0))
    telemetry.close()
    assert files.aside(0).stat().st_size == SMALL_BYTES
    assert files.rows.stat().st_size == module.ROW_BYTES
    assert steps(RowReader(files).read()) == [0, 1, 2, 3]


@given(
    st.lists(
        st.one_of(st.tuples(st.just("write"), st.integers(1, 5)), st.just(("read", 1))), max_size=30
    ),
    st.integers(1, 4),
)
def test_no_row_is_lost_or_doubled(tmp_path_factory, turns, most):
    """However writes, files that are put aside, and reads of any size follow each other."""
    files = RankFiles(tmp_path_factory.mktemp("attempt"), 0)
    telemetry = Telemetry(files, period_s=NEVER_S, put_aside_bytes=SMALL_BYTES, kept_whole=1000)
    tail, found, number = RowReader(files), [], itertools.count()
    for kind, count in turns:
        if kind == "write":
            for _ in range(count):
                telemetry.emit(row(next(number), 0))
            telemetry._write()
        else:
            found += tail.read(most)
    assert telemetry.close() == 0
    found += drained(tail, most)
    assert steps(found) == list(range(next(number)))
    assert steps(drained(RowReader(files))) == steps(found)


@pytest.mark.slow
@settings(max_examples=40)
@given(st.lists(st.one_of(st.integers(1, 9), st.just(0)), max_size=60), st.integers(1, 4))
@example([1, 0, 0, 9], 1)
def test_old_rows_are_thinned_whoever_reads_them(tmp_path_factory, turns, most):
    """Rows are written, or read (0), in turns; a reader may be overtaken by what is thinned."""
    files = RankFiles(tmp_path_factory.mktemp("attempt"), 0)
    telemetry = Telemetry(files, period_s=NEVER_S, put_aside_bytes=SMALL_BYTES)
    tail, found, number = RowReader(files), [], itertools.count()
    for count in turns:
        for _ in range(count):
            telemetry.emit(row(next(number), 0))
            telemetry._write()
        found += [] if count else tail.read(most)
    assert telemetry.close() == 0
    found += drained(tail, most)
    total, kept = next(number), steps(drained(RowReader(files)))
    assert sorted(set(steps(found))) == steps(found)
    assert set(kept) <= set(steps(found)) <= set(range(total))
    recent = 2 * 3 + total % 3
    assert set(range(max(0, total - recent), total)) <= set(kept)
    assert len(kept) <= 3 + recent


def test_readers_beside_a_writer_miss_nothing(files):
    """Two readers that never stop, while files are put aside as fast as they can be."""
    total, found = 3000, ([], [])

    def read(into):
        tail = RowReader(files)
        while len(into) < total:
            into += tail.read(5)

    readers = [threading.Thread(target=read, args=(into,), daemon=True) for into in found]
    for reader in readers:
        reader.start()
    telemetry = Telemetry(files, period_s=0.0001, put_aside_bytes=SMALL_BYTES, kept_whole=total)
    for step in range(total):
        telemetry.emit(row(step, 0))
    telemetry.close()
    for reader in readers:
        reader.join(20)
    assert all(steps(into) == list(range(total)) for into in found)


@pytest.mark.parametrize("cut", [1, module.ROW_BYTES // 2, module.ROW_BYTES - 1])
def test_half_a_row_waits_for_its_other_half(files, cut):
    packed = module.pack_row(row(0, 0)) + module.pack_row(row(1, 0))
    tail = RowReader(files)
    files.rows.write_bytes(packed[: module.ROW_BYTES + cut])
    assert steps(tail.read()) == [0]
    assert tail.read() == []
    with files.rows.open("ab") as file:
        file.write(packed[module.ROW_BYTES + cut :])
    assert steps(tail.read()) == [1]


def test_a_disk_that_is_full_for_a_while_loses_nothing(files, monkeypatch):
    telemetry = Telemetry(files, period_s=NEVER_S)
    write, room = os.write, iter([7, 0, 1, 10_000])

    def short(file, data):
        if not (taken := next(room)):
            raise OSError(28, "No space left on device")
        return write(file, data[:taken])

    for step in range(3):
        telemetry.emit(row(step, 0))
    monkeypatch.setattr(os, "write", short)
    telemetry._write()
    with pytest.raises(OSError, match="space"):
        telemetry._write()
    assert telemetry.close() == 0
    assert steps(RowReader(files).read()) == [0, 1, 2]


def test_rows_that_found_no_room_are_missed(files, monkeypatch):
    telemetry = Telemetry(files, period_s=NEVER_S)
    telemetry.emit(row(0, 0))

    def full(_file, _data):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    assert telemetry.close() == 1
    assert RowReader(files).read() == []


def test_a_look_at_nothing_new_opens_nothing(files, monkeypatch):
    telemetry = Telemetry(files, period_s=NEVER_S)
    telemetry.emit(row(0, 0))
    telemetry.close()
    tail = RowReader(files)
    assert steps(tail.read()) == [0]
    monkeypatch.setattr(RowReader, "_read", lambda *_: pytest.fail("it was opened"))
    assert tail.read() == []


def test_a_follower_reads_every_rank(tmp_path):
    for rank in range(2):
        telemetry = Telemetry(RankFiles(tmp_path, rank), period_s=NEVER_S)
        for step in range(3):
            telemetry.emit(row(step, rank))
        telemetry.close()
    follower = AttemptReader(tmp_path, 3)
    found = follower.read(2) + follower.read(2) + follower.read(2)
    assert sorted((each["rank"], each["step"]) for each in found) == [
        (rank, step) for rank in range(2) for step in range(3)
    ]


def test_counts_are_whole_numbers_again():
    emitted = {**row(3, 1), "peak_bytes": 123_456_789_012.0, "loss": 2.5}
    (received,) = module.unpack_rows(module.pack_row(emitted))
    assert (repr(received["step"]), repr(received["peak_bytes"])) == ("3", "123456789012")
    assert repr(received["loss"]) == "2.5"


@pytest.mark.parametrize("change", [{"lossy": 1.0}, {"loss": None}])
def test_a_row_has_exactly_the_columns(change):
    wrong = {k: v for k, v in {**row(0, 0), **change}.items() if v is not None}
    with pytest.raises(ValueError, match="a row has the columns"):
        module.pack_row(wrong)


def test_a_disk_that_is_gone_for_a_moment_loses_no_row(files, monkeypatch):
    """What was read before is given; the rest, and what others have, when it can be read."""
    telemetry = Telemetry(files, period_s=NEVER_S, put_aside_bytes=SMALL_BYTES)
    for step in range(3):
        telemetry.emit(row(step, 0))
    telemetry._write()  # and puts them aside
    telemetry.emit(row(3, 0))
    telemetry.close()
    other = RankFiles(files.folder, 1)
    of_other = Telemetry(other, period_s=NEVER_S)
    of_other.emit(row(0, 1))
    of_other.close()
    read, gone = RowReader._read, [str(files.rows)]

    def reads(tail, path, room):
        if path in gone:
            raise OSError(5, "Input/output error")
        return read(tail, path, room)

    monkeypatch.setattr(RowReader, "_read", reads)
    reader = AttemptReader(files.folder, 2)
    assert [(each["rank"], each["step"]) for each in reader.read()] == [
        *((0, step) for step in range(3)),
        (1, 0),
    ]
    with pytest.raises(OSError, match="Input/output"):
        reader.read()
    gone.clear()
    assert steps(reader.read()) == [3]
    assert reader.read() == []
