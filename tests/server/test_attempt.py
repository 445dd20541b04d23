"""An attempt sees its ranks by the files that they leave."""

from workbench.server.attempt import Attempt
from workbench.store.process import ProcessIdentity
from workbench.store.rank_files import RankFiles


def test_how_a_rank_died_is_waited_for_though_none_has_begun(tmp_path):
    """As when a supervisor was killed, and its engines with it, while a job was starting."""
    here = ProcessIdentity.here()
    attempt = Attempt(1, 1, tmp_path / "1", (0, 1), (here, here))
    attempt.poll(0.0, {here}, lambda process: None)
    attempt.steer(0.0, stop=False, abort=False)
    assert attempt.is_withdrawn
    assert not attempt.has_ended
    attempt.poll(1.0, {here}, lambda process: "ended")
    assert attempt.has_ended
    assert [end.death for end in attempt.ends()] == ["ended", "ended"]


def test_a_rank_that_has_just_begun_is_seen_when_it_matters(tmp_path):
    """Between two looks: whoever stops a run as soon as it steps shall get its checkpoint."""
    attempt = Attempt(1, 1, tmp_path / "1", (0, 1), (ProcessIdentity.here(),) * 2)
    assert attempt.none_has_begun()
    assert RankFiles(tmp_path / "1", 1).begin()
    attempt.poll(0.0, (), lambda pid: None)  # soon after the first one: it looks at nothing
    assert not attempt.none_has_begun()
    assert not attempt.has_begun
    assert not attempt.is_withdrawn
