"""`%wb` and `%%ranks` in a shell of IPython's, with ranks that only remember."""

from types import SimpleNamespace

import pytest
from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output

import workbench as wb
from tests.plan.graphs import mlp
from workbench.client.ranks import CellOutput, RankOutput, Ranks
from workbench.magics import register
from workbench.magics.magics import CellFailed, complete_ranks, complete_wb


class FakeRanks(Ranks):
    def __init__(self):
        self.ran, self.is_closed, self.state = [], False, "done"

    @property
    def is_open(self):
        return not self.is_closed

    def run(self, source, ranks=None, progress=None):
        self.ran.append((source, ranks))
        error = "KeyError: 'x'" if self.state == "raised" else ""
        self.last = CellOutput(1, (RankOutput(0, self.state, "said so\n", None, error, error),))
        if progress is not None:
            progress(self.last)
        return self.last

    def close(self):
        self.is_closed = True


class FakeCluster(wb.Cluster):
    def __init__(self):
        self.opened = []

    @property
    def jobs(self):
        return SimpleNamespace(table=lambda: "all jobs")

    def ranks(self, plan):
        self.opened.append(plan)
        return FakeRanks()

    def __repr__(self):
        return "<a cluster>"

    def _repr_html_(self):
        return "<a cluster>"


@pytest.fixture(scope="module")
def interactive():
    yield InteractiveShell.instance()
    InteractiveShell.clear_instance()  # else this process is a notebook for all later tests


@pytest.fixture
def shell(interactive):
    interactive.reset()
    register(interactive)
    return interactive


def test_the_extension_loads(interactive):
    interactive.reset()
    interactive.run_line_magic("load_ext", "workbench")
    with pytest.raises(UsageError, match=r"%wb status \| jobs \| open \| close; got 'x'"):
        interactive.run_line_magic("wb", "x")


def test_status_and_jobs_are_those_of_the_notebook_s_cluster(shell):
    with pytest.raises(UsageError, match=r"no cluster: cluster = wb.Cluster\(4\)"):
        shell.run_line_magic("wb", "status")
    shell.user_ns["cluster"] = shell.user_ns["same"] = FakeCluster()
    with capture_output() as shown:
        shell.run_line_magic("wb", "status")
        shell.run_line_magic("wb", "jobs")
    assert [each.data["text/plain"] for each in shown.outputs] == ["<a cluster>", "'all jobs'"]


def test_ranks_are_opened_used_and_closed(shell):
    plan = wb.Plan.data_parallel(mlp(4, 4), 2)
    cluster = FakeCluster()
    shell.user_ns |= {"cluster": cluster, "plan": plan}
    with pytest.raises(UsageError, match="no open Ranks: open some with %wb open PLAN"):
        shell.run_cell_magic("ranks", "", "x = 1")
    with pytest.raises(UsageError, match=r"takes the name of a plan or experiment \(plan\)"):
        shell.run_line_magic("wb", "open plain")
    with capture_output():
        shell.run_line_magic("wb", "open plan")
    assert cluster.opened == [plan]
    ranks = shell.user_ns["ranks"]
    with capture_output() as shown:
        shell.run_cell_magic("ranks", "", "x = 1")
        shell.run_cell_magic("ranks", "--ranks 0,2-3 --quiet", "x = 2")
    assert ranks.ran == [("x = 1", None), ("x = 2", [0, 2, 3])]
    _first, *updates = shown.outputs
    assert all("said so" in each.data["text/html"] for each in updates)
    assert len(updates) == 2
    with capture_output():
        shell.run_line_magic("wb", "open plan")
    assert ranks.is_closed
    shell.run_line_magic("wb", "close")
    assert "ranks" not in shell.user_ns


def test_a_comment_may_follow(shell):
    plan = wb.Plan.data_parallel(mlp(4, 4), 2)
    shell.user_ns |= {"cluster": FakeCluster(), "plan": plan}
    with capture_output():
        shell.run_cell("%wb open plan        # engines hold its model").raise_error()
        shell.run_cell("%%ranks --ranks 0,2  # two of them\nx = 1  # kept").raise_error()
        shell.run_cell("%wb status # all").raise_error()
    assert shell.user_ns["ranks"].ran == [("x = 1  # kept\n", [0, 2])]
    with pytest.raises(UsageError, match=r"open \| close; got ''"):
        shell.run_line_magic("wb", "# status")


def test_a_cell_that_raises_ends_the_notebook_s_run(shell):
    shell.user_ns["ranks"] = ranks = FakeRanks()
    ranks.state = "raised"
    with capture_output(), pytest.raises(CellFailed, match="rank 0 raised KeyError: 'x'") as raised:
        shell.run_cell_magic("ranks", "", "x")
    assert raised.value._render_traceback_() == ["CellFailed: rank 0 raised KeyError: 'x'"]
    ranks.state = "interrupted"
    with capture_output(), pytest.raises(CellFailed, match="interrupted"):
        shell.run_cell_magic("ranks", "", "x")
    with pytest.raises(UsageError, match="takes numbers such as 0,2 or 1-3, got 'a'"):
        shell.run_cell_magic("ranks", "--ranks a", "x")
    shell.user_ns["others"] = FakeRanks()
    with pytest.raises(UsageError, match=r"more than one open Ranks \(others, ranks\): keep one"):
        shell.run_cell_magic("ranks", "", "x")


def test_the_tab_key_offers_what_is_there(shell):
    shell.user_ns |= {"mine": wb.Plan.data_parallel(mlp(4, 4), 2), "other": 3}

    def offered(line):
        return complete_wb(shell, SimpleNamespace(line=line))

    assert offered("%wb ") == ["status", "jobs", "open", "close"]
    assert offered("%wb open ") == ["mine"]
    assert offered("%wb open m") == ["mine"]
    assert offered("%wb status ") == []
    assert complete_ranks(shell, SimpleNamespace(line="%%ranks ")) == ["--ranks", "--quiet"]
