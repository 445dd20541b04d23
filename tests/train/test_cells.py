"""Cells on a rank that is alone: what they find, what they say, and how they end."""

import time
from types import SimpleNamespace

import pytest
import torch
from torch.distributed import TCPStore

from tests.train.small import net
from workbench.model.tracing.trace import trace
from workbench.model.weights.initial import initialize
from workbench.plan.experiment.experiment import Experiment, Synthetic
from workbench.plan.placement.placement import RankConfig
from workbench.plan.plans.plan import Plan
from workbench.train.run import cells
from workbench.train.run.cells import MOST_SHOWN, Cell, CellFiles, Ending, serve

LEAVE = Cell("raise KeyboardInterrupt", (0,))


@pytest.fixture
def files(tmp_path):
    return CellFiles(tmp_path)


def test_a_cell_is_there_once_it_was_asked(files):
    assert files.asked(1) is None
    cell = Cell("x = 1", (0, 2), anew=True)
    files.ask(1, cell)
    assert files.asked(1) == cell
    assert files.asked(2) is None
    files.ask(2, Cell("y", (1,)))
    assert files.asked(2) == Cell("y", (1,), anew=False)


def test_only_the_cell_that_was_interrupted_is(files):
    files.interrupt(2)
    assert [files.is_interrupted(number) for number in (1, 2, 3)] == [False, True, False]


def test_every_rank_has_its_ending(files):
    ending = Ending("raised", None, "KeyError: 'x'", "Traceback", 1.5)
    files.end(3, 1, ending)
    assert files.ending(3, 1) == ending
    assert files.ending(3, 0) is None
    assert files.ending(1, 1) is None
    files.end(3, 0, Ending("done", "7"))
    assert files.ending(3, 0) == Ending("done", "7", "", "", 0.0)


def test_what_is_asked_leaves_no_parts(files):
    files.ask(12, LEAVE)
    files.end(12, 3, Ending("skipped"))
    assert sorted(path.name for path in files.folder.iterdir()) == [
        "0012.cell",
        "0012.rank-3.json",
    ]


def test_a_rank_that_printed_nothing_has_an_empty_text(files):
    assert files.printed(1, 0) == ""


def test_of_very_much_the_end_is_shown(files):
    path = files.printed_to(1, 0)
    path.write_text("a" * MOST_SHOWN)
    assert files.printed(1, 0) == "a" * MOST_SHOWN
    path.write_text("bcd" + "a" * (MOST_SHOWN - 1))
    shown = files.printed(1, 0)
    assert shown == "[... 2 bytes before]\nd" + "a" * (MOST_SHOWN - 1)


@pytest.fixture(scope="module")
def experiment():
    graph = trace(net(), input_shape=(3, 8, 8))
    data = Synthetic(samples=8, classes=10)
    return Experiment(
        plan=Plan.data_parallel(graph, 1), data=data, optimizer="sgd", batch_size=4, steps=2
    )


@pytest.fixture(scope="module")
def weights(experiment, tmp_path_factory):
    return initialize(experiment.plan.graph, 0, tmp_path_factory.mktemp("weights"), module=net())


@pytest.fixture(scope="module")
def store():
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@pytest.fixture
def run(files, experiment, weights, store, request):
    """Runs cells one after another on a rank; gives how each ended."""

    def ended(*cells):
        asked = [cell if isinstance(cell, Cell) else Cell(cell, (0,)) for cell in cells]
        for number, cell in enumerate([*asked, LEAVE], 1):
            files.ask(number, cell)
        config = RankConfig(0, 1, "127.0.0.1", store.port, request.node.name)
        threads = torch.get_num_threads()
        try:
            with pytest.raises(KeyboardInterrupt):
                serve(config, experiment, weights=weights, folder=files.folder)
        finally:
            torch.set_num_threads(threads)
        assert files.ending(len(asked) + 1, 0) is None  # it left
        return [files.ending(number, 0) for number in range(1, len(asked) + 1)]

    return ended


def test_cells_on_a_rank(run, files):
    """All in one world, as opening one takes a while."""
    long = 20_000
    endings = run(
        "x = 2\nprint('said', x)",
        "import sys; print('wrong', file=sys.stderr); x + 1",
        "_ * 10",
        "None",
        "(rank, world_size, group.size, world.rank, device.type, plan.world_size)",
        "experiment.plan is plan, state.model is model, dist is torch.distributed",
        "comm.all_reduce.__name__, wb.Plan is type(plan), group in groups.values()",
        Cell("x = 100", (1,)),
        "x",
        "def fails():\n    return {}['y']\nfails()",
        "raise SystemExit(3)",
        "1 +",
        "",
        f"'a' * {long - 2}",
        f"'a' * {long + 1}",
        "import time; time.sleep(0.01)",
        "before, old = next(iter(model.pieces().values())), world; before.data.fill_(5.0)",
        Cell("after = next(iter(model.pieces().values())); after.min().item()", (0,), anew=True),
        "world is old, after is before, x, group in groups.values()",
    )
    states = ["done"] * 19
    states[7], states[9:12] = "skipped", ["raised"] * 3
    assert [ending.state for ending in endings] == states
    values = [ending.value for ending in endings]
    assert values[:5] == [None, "3", "30", None, "(0, 1, 1, 0, 'cpu', 1)"]
    assert values[5:7] == ["(True, True, True)", "('all_reduce', True, True)"]
    assert values[7:9] == [None, "2"]
    assert values[12] is None
    assert values[13] == f"'{'a' * (long - 2)}'"
    assert values[14] == f"'{'a' * (long - 1)}\n[... 3 characters more]"
    assert values[17:] == ["5.0", "(False, False, 2, True)"]
    assert [files.printed(number, 0) for number in (1, 2, 3)] == ["said 2\n", "wrong\n", ""]
    said = endings[9]
    assert said.error == "KeyError: 'y'"
    assert "return {}['y']" in said.traceback  # the line of the cell
    assert '"<cell 10>", line 2, in fails' in said.traceback
    assert "cells.py" not in said.traceback
    assert endings[10].error == "SystemExit: 3"
    assert endings[11].error == "SyntaxError: invalid syntax"
    assert endings[0].error == endings[0].traceback == ""
    assert endings[7].seconds == 0.0
    assert 0.01 <= endings[15].seconds < 60


def test_an_interrupt_of_a_cell_ends_that_cell_only(run, files):
    files.interrupt(1)
    first, second = run("raise KeyboardInterrupt", "7")
    assert first.state == "interrupted"
    assert (second.state, second.value) == ("done", "7")


def test_an_interrupt_that_comes_late_ends_no_other_cell(run, files, monkeypatch):
    """Meant for the first one, it arrives while the rank waits for the second."""
    files.interrupt(1)
    asked, late = CellFiles.asked, [2]

    def not_yet(self, number):
        return None if number in late else asked(self, number)

    def interrupted(seconds):
        late.clear()
        raise KeyboardInterrupt

    clock = SimpleNamespace(sleep=interrupted, perf_counter=time.perf_counter)
    monkeypatch.setattr(CellFiles, "asked", not_yet)
    monkeypatch.setattr(cells, "time", clock)
    first, second = run("3", "7")
    assert (first.value, second.state, second.value) == ("3", "done", "7")
