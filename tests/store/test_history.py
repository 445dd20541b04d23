"""Metrics take the same room after a week as after an hour."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workbench.plan.metrics import COLUMNS
from workbench.store import rows
from workbench.store.history import RECENT
from workbench.store.store import Store


@pytest.fixture
def store(tmp_path):
    store = Store(tmp_path / "server.sqlite", create=True)
    yield store
    store.close()


def packed(steps, rank=0, loss=0.5):
    values = dict.fromkeys(COLUMNS, 0.0) | {"rank": rank, "loss": loss, "rss_bytes": 1e6}
    return b"".join(rows.pack({**values, "step": step}) for step in steps)


def steps_of(store, rank=0):
    return [row["step"] for row in store.rows(1, ranks=(rank,))]


def test_rows_come_back_as_they_were(store):
    store.add_rows(1, packed(range(3), rank=1) + packed(range(2)))
    assert [(row["step"], row["rank"]) for row in store.rows(1)] == [
        (0, 0),
        (0, 1),
        (1, 0),
        (1, 1),
        (2, 1),
    ]
    row = store.rows(1, after=1)[0]
    assert tuple(row) == COLUMNS
    assert (row["loss"], row["rss_bytes"], type(row["rss_bytes"])) == (0.5, 1_000_000, int)


def test_of_repeated_steps_the_last_stays(store):
    store.add_rows(1, packed(range(10)))
    store.add_rows(1, packed(range(5, 8), loss=0.25))
    assert [row["loss"] for row in store.rows(1)] == [0.5] * 5 + [0.25] * 3 + [0.5] * 2


def test_half_a_row_is_refused(store):
    size = rows.ROW_BYTES
    with pytest.raises(ValueError, match=f"rows have {size} bytes each, got {size + 1}"):
        store.add_rows(1, packed([0]) + b"x")


@settings(max_examples=8, deadline=None, derandomize=True)
@given(st.lists(st.integers(1, 1500), min_size=1, max_size=4))
def test_the_last_are_whole_and_the_earlier_ones_even(tmp_path_factory, batches):
    store = Store(tmp_path_factory.mktemp("store") / "server.sqlite", create=True)
    total = 0
    for size in batches:
        store.add_rows(1, packed(range(total, total + size)))
        total += size
    steps = steps_of(store)
    assert steps[-RECENT:] == list(range(max(0, total - RECENT), total))
    assert steps[0] == 0
    assert len(steps) <= 2.5 * RECENT + 2
    older = steps[: -RECENT or None]
    strides = {later - earlier for earlier, later in pairwise(older)}
    assert all(stride & (stride - 1) == 0 for stride in strides)
    store.close()


def test_a_run_that_goes_back_is_thinned_as_well(store):
    for start in range(0, 8000, 100):
        store.add_rows(1, packed(range(start, start + 100)))
    for start in range(0, 8000, 100):  # once more from its beginning
        store.add_rows(1, packed(range(start, start + 100)))
    assert len(steps_of(store)) <= 2.5 * RECENT + 2


def test_many_rows_take_no_more_room_than_some_thousand(store):
    """Each rank's are thinned by themselves, so that a few ranks show what many would."""
    sizes = []
    for start in range(0, 32 * RECENT, 128):
        batch = b"".join(packed(range(start, start + 128), rank) for rank in range(6))
        store.add_rows(1, batch)
        sizes.append(store.path.stat().st_size)
    assert max(sizes) < 1.2 * max(sizes[: len(sizes) // 4])
