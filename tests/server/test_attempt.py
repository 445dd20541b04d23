"""An attempt sees its ranks by the files that they leave."""

from workbench.server.attempt import Attempt
from workbench.store.process import ProcessIdentity
from workbench.store.rank_files import RankFiles


def test_a_rank_that_has_just_begun_is_seen_when_it_matters(tmp_path):
    """Between two looks: whoever stops a run as soon as it steps shall get its checkpoint."""
    attempt = Attempt(1, 1, tmp_path / "1", (0, 1), (ProcessIdentity.here(),) * 2)
    assert attempt.none_has_begun()
    assert RankFiles(tmp_path / "1", 1).begin()
    attempt.poll(0.0, (), lambda pid: None)  # soon after the first one: it looks at nothing
    assert not attempt.none_has_begun()
    assert not attempt.has_begun
    assert not attempt.is_withdrawn
