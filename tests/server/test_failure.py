"""Which rank's failure is told, and what is said of the others."""

import pickle

from tests.client.fake_session import LayerError
from workbench.server.outcome import End, first_failure
from workbench.store.errors import EngineDied, RankError
from workbench.store.messages import Answer


def raised(rank: int, kind: str, time: float, layer: str | None = None) -> End:
    answer = Answer("raised", error=(kind, "why"), layer=layer, traceback="where", time=time)
    return End(rank, 100 + rank, answer)


FINE = End(0, 100, Answer("returned"))
INTERRUPTED = End(1, 101, Answer("interrupted"))


def test_no_failure_where_all_returned():
    assert first_failure([FINE, FINE]) is None


def test_the_first_exception_is_told_and_the_others_counted():
    ends = [raised(0, "PeerLost", 12.0), raised(1, "PeerLost", 11.0), raised(2, "OOM", 10.0, "fc1")]
    error = first_failure(ends)
    assert isinstance(error, RankError)
    assert (error.rank, error.layer, error.kind, error.text) == (2, "fc1", "OOM", "why")
    lines = str(error).splitlines()
    assert lines[0] == "rank 2 failed in layer 'fc1': OOM: why"
    assert lines[1] == "2 other ranks failed after it: PeerLost on ranks 0, 1"
    assert lines[-1] == error.remote_traceback == "where"


def test_what_others_say_of_a_rank_that_failed_is_not_told_first_however_soon_it_is_said():
    error = first_failure([raised(0, "PeerLost", 10.0), raised(1, "OOM", 11.0, "fc1")])
    assert (error.rank, error.kind) == (1, "OOM")
    assert "PeerLost on rank 0" in str(error)


def test_an_interrupted_survivor_is_no_failure():
    error = first_failure([raised(0, "ValueError", 5.0), INTERRUPTED])
    assert "other rank" not in str(error)


def test_a_lost_process_comes_before_what_others_say_of_it():
    died = End(1, 101, None, "was ended by SIGKILL")
    error = first_failure([raised(0, "PeerLost", 1.0), died])
    assert isinstance(error, EngineDied)
    assert (error.rank, error.death) == (1, "was ended by SIGKILL")
    assert str(error).splitlines() == [
        "rank 1 (pid 101) died: its process was ended by SIGKILL",
        "1 other rank failed after it: PeerLost on rank 0",
    ]


def test_a_rank_that_we_ended_is_not_the_culprit():
    ended = End(0, 100, None, "was ended by SIGKILL", is_killed=True)
    error = first_failure([ended, raised(1, "ValueError", 1.0)])
    assert isinstance(error, RankError)
    assert error.rank == 1
    assert "rank 0 could not be interrupted and had to be ended" in str(error)


def test_an_interrupt_from_elsewhere_is_told():
    error = first_failure([FINE, INTERRUPTED])
    assert str(error) == "rank 1 (pid 101) was interrupted"


def test_an_exception_becomes_an_answer():
    try:
        raise LayerError("no room")
    except LayerError as error:
        answer = Answer.unpack(Answer.of(error).pack())
    assert (answer.kind, answer.error, answer.layer) == ("raised", ("LayerError", "no room"), "fc1")
    assert "test_an_exception_becomes_an_answer" in answer.traceback
    assert Answer.of(KeyboardInterrupt()).kind == "interrupted"


def test_an_endless_exception_is_cut():
    answer = Answer.of(ValueError("x" * 1_000_000))
    assert len(pickle.dumps(answer)) < 64 << 10
