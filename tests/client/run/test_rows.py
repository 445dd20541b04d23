"""What a notebook holds of a run's metrics."""

import math
import threading

import pytest

from tests.client.fake_session import row
from workbench.client.run.rows import Rows
from workbench.plan.experiment.metrics import COLUMNS

RANKS = 4


def step(number: int, **values: float) -> list[dict[str, float]]:
    return [{**row(number, rank), "accuracy": math.nan, **values} for rank in range(RANKS)]


def fed(steps: int, most: int = 10_000, **values: float) -> Rows:
    rows = Rows(most)
    for number in range(steps):
        rows.extend(step(number, **values))
    return rows


def test_they_are_a_sequence():
    rows = fed(3)
    assert len(rows) == rows.num_arrived == 3 * RANKS
    first = rows[0]
    assert {**first, "time": 0.0, "accuracy": 0.0} == {**row(0, 0), "time": 0.0, "accuracy": 0.0}
    assert math.isnan(first["accuracy"])
    assert (rows[-1]["step"], rows[-1]["rank"]) == (2, RANKS - 1)
    assert type(rows[-1]["step"]) is int
    assert [each["rank"] for each in rows[-2:]] == [RANKS - 2, RANKS - 1]
    assert [each["step"] for each in rows] == [0] * RANKS + [1] * RANKS + [2] * RANKS
    with pytest.raises(IndexError):
        rows[3 * RANKS]
    assert not Rows()
    assert list(Rows()) == []


def test_each_row_is_read_once():
    rows, seen, number = Rows(), [], 0
    for count in range(5):
        rows.extend(step(count))
        news, number = rows.since(number)
        seen += [(each["step"], each["rank"]) for each in news]
    assert seen == [(count, rank) for count in range(5) for rank in range(RANKS)]
    assert rows.since(number) == ([], 5 * RANKS)


def test_an_unknown_column_is_an_error():
    with pytest.raises(ValueError, match="columns"):
        Rows().extend([{"step": 0, "rank": 0}])


def test_the_newest_of_each_rank_that_reported_last():
    rows = fed(3)
    rows.extend(step(3)[:2])
    assert [(each["rank"], each["step"]) for each in rows.newest(RANKS)] == [
        (0, 3),
        (1, 3),
        (2, 2),
        (3, 2),
    ]
    assert [each["rank"] for each in rows.newest(2)] == [0, 1]  # the world became smaller
    assert [each["rank"] for each in rows.newest(1)] == [1]
    assert Rows().newest(RANKS) == []


def test_of_a_step_that_was_run_again_the_table_has_the_last():
    rows = fed(3)
    rows.extend(step(1, loss=7.0))
    frame = rows.to_frame()
    assert list(frame.columns) == list(COLUMNS)
    assert frame["step"].tolist() == [0] * RANKS + [1] * RANKS + [2] * RANKS
    assert frame.query("step == 1").loss.tolist() == [7.0] * RANKS
    assert frame["step"].dtype == frame["peak_bytes"].dtype == "int64"
    frame["loss"] = 0.0
    assert rows.to_frame()["loss"].max() == 7.0


def test_a_column_that_another_version_did_not_have():
    rows = fed(1, peak_bytes=math.nan)
    assert rows.to_frame()["peak_bytes"].isna().all()
    assert math.isnan(rows[0]["peak_bytes"])


@pytest.mark.parametrize("most", [100, 1000])
@pytest.mark.parametrize("steps", [26, 300, 5000])
def test_a_long_run_is_thinned(steps, most):
    rows = fed(steps, most)
    assert len(rows) <= max(most + most // 8 + RANKS, RANKS)
    assert rows.num_arrived == steps * RANKS
    if steps * RANKS <= most:
        assert (rows.stride, len(rows)) == (1, steps * RANKS)
        return
    frame = rows.to_frame()
    assert (frame.groupby("step")["rank"].count() == RANKS).all()  # whole steps
    found = frame["step"].unique()
    assert (found[0], found[-1]) == (0, steps - 1)
    gaps = frame["step"].drop_duplicates().diff().dropna()
    assert gaps.max() <= rows.stride  # of all of the run
    assert (gaps.iloc[-most // RANKS // 4 :] == 1).all()  # the newest are whole


def test_few_evaluated_steps_stay():
    rows = Rows(1000)
    for number in range(5000):
        rows.extend(step(number, **({"accuracy": 0.5} if number % 700 == 699 else {})))
    found = rows.to_frame().query("accuracy == accuracy")["step"].unique().tolist()
    assert found == list(range(699, 5000, 700))
    assert len(fed(5000, 1000, accuracy=0.5)) <= 1130  # all were


def test_the_peak_of_a_step_that_is_gone_stays():
    rows = Rows(100)
    for number in range(200):
        rows.extend(step(number, peak_bytes=9 if number == 3 else 5))
    assert rows.to_frame()["peak_bytes"].max() == 5
    assert rows.peaks == dict.fromkeys(range(RANKS), 9)


def test_who_reads_late_gets_what_is_left():
    rows = fed(300, 100)
    news, number = rows.since(0)
    assert [(each["step"], each["rank"]) for each in news] == [
        (each["step"], each["rank"]) for each in rows
    ]
    assert number == 300 * RANKS
    later, _ = rows.since(299 * RANKS)
    assert [each["step"] for each in later] == [299] * RANKS


def test_reading_while_they_come_sees_whole_rows():
    rows, failed = Rows(400), []

    def read() -> None:
        number = 0
        while number < 2000 * RANKS:
            news, number = rows.since(number)
            every = [*news, *rows, *rows.newest(RANKS)]
            failed.extend(each for each in every if each["loss"] != 1.0 / (1 + each["step"]))

    reader = threading.Thread(target=read)
    reader.start()
    for number in range(2000):
        rows.extend(step(number))
    reader.join()
    assert not failed
