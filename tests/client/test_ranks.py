"""Cells on ranks: names that stay, what each rank says, and ranks that part."""

import os
import signal
import threading

import pytest

import workbench as wb
from workbench.client.ranks import CellOutput, RankOutput
from workbench.store.errors import ControlMessageTooLarge, EngineDied


@pytest.fixture(scope="module")
def plan():
    graph = wb.trace("mobilenet_v3_small", input_shape=(3, 32, 32), num_classes=10)
    return wb.Plan.hybrid(graph, world_size=2, group_size=2)


@pytest.fixture(scope="module")
def ranks(cluster, plan):
    with cluster.ranks(plan) as ranks:
        yield ranks
    assert cluster.occupied == {}


def states(output):
    return [each.state for each in output.ranks]


def values(output):
    return [each.value for each in output.ranks]


@pytest.mark.slow
def test_a_cell_has_the_model_and_what_cells_before_it_made(ranks):
    found = ranks.run("print('from', rank)\nx = 10 * rank\n(world_size, plan.world_size, x)")
    assert values(found) == ["(2, 2, 0)", "(2, 2, 10)"]
    assert [each.printed for each in found.ranks] == ["from 0\n", "from 1\n"]
    held = "sorted(piece.shape[0] for name, piece in model.pieces().items() if name == {!r})"
    cut = values(ranks.run(held.format("classifier.0.weight")))
    assert cut == ["[512]", "[512]"]  # of 1,024
    assert values(ranks.run("x += 1; x", [1])) == ["11"]
    assert values(ranks.run("x")) == ["0", "11"]
    assert values(ranks.run("y = 1")) == [None, None]


def test_a_training_step_goes_through_the_groups(ranks):
    before = values(ranks.run("(loss := state.stepper.run(0).loss) > 0"))
    assert before == ["True", "True"]
    after = ranks.run("state.stepper.update(); float(comm.all_reduce(torch.ones(1), group))")
    assert values(after) == ["2.0", "2.0"]


@pytest.mark.slow
def test_ranks_that_parted_meet_again_and_the_model_keeps_its_values(ranks):
    mark = "next(iter(model.pieces().values())).flatten()[:1].fill_(rank + 0.5); mine = 7"
    ranks.run(f"with torch.no_grad(): {mark}")
    parted = ranks.run("1 / rank; comm.all_reduce(torch.ones(1), group)")
    assert states(parted) == ["raised", "interrupted"]
    assert parted[0].error == "ZeroDivisionError: division by zero"
    assert "1 / rank" in parted[0].traceback
    assert "cells.py" not in parted[0].traceback
    again = ranks.run("(mine, float(next(iter(model.pieces().values())).flatten()[0]))")
    assert values(again) == ["(7, 0.5)", "(7, 1.5)"]
    met = ranks.run("float(comm.all_reduce(torch.ones(1), group))")
    assert values(met) == ["2.0", "2.0"]


def test_all_may_raise_and_nothing_is_made_anew(ranks):
    ranks.run("before = id(world)")
    for wrong in ("1 +", "raise SystemExit", "nowhere"):
        assert states(ranks.run(wrong)) == ["raised", "raised"]
    assert values(ranks.run("id(world) == before")) == ["True", "True"]


def test_an_interrupt_ends_the_cell_alone(ranks):
    def press(shown):
        if all(each.printed for each in shown.ranks):
            signal.signal(signal.SIGINT, signal.default_int_handler)
            os.kill(os.getpid(), signal.SIGINT)

    found = ranks.run("print('on')\nimport time\nwhile True: time.sleep(0.01)", progress=press)
    assert states(found) == ["interrupted", "interrupted"]
    assert values(ranks.run("rank")) == ["0", "1"]


def test_what_cannot_be_run_is_refused(cluster, ranks):
    with pytest.raises(ValueError, match=r"some of 0\.\.1, got \[2\]"):
        ranks.run("1", [2])
    with pytest.raises(ValueError, match="got \\[\\]"):
        ranks.run("1", [])
    with pytest.raises(ControlMessageTooLarge, match="Let the ranks"):
        ranks.run("#" * (64 << 10) + "\n")
    with pytest.raises(TypeError, match="a Plan or an Experiment, got str"):
        cluster.ranks("vgg11")
    assert repr(ranks).startswith("<Ranks: 2 with mobilenet_v3_small: ")


@pytest.mark.slow
def test_a_dead_engine_is_told_and_others_can_be_opened(cluster, ranks, plan):
    ranks.close()
    with pytest.raises(wb.ClusterError, match=r"cluster\.ranks\(plan\) opens others"):
        ranks.run("1")
    with cluster.ranks(plan) as others:
        others.run("1")
        threading.Timer(0.2, cluster.kill, [1]).start()
        with pytest.raises(EngineDied, match="rank 1"):
            others.run("import time; time.sleep(60)")
        assert not others.is_open
    assert cluster.occupied == {}


def test_ranks_that_say_the_same_are_shown_once(tmp_path):
    same = [RankOutput(rank, "done", "", "3") for rank in (0, 2)]
    raised = RankOutput(1, "raised", "<b>", None, "ValueError: <i>", "Traceback <i>")
    output = CellOutput(4, (same[0], raised, same[1]))
    assert [text.splitlines()[0] for text in repr(output).split("[")[1:]] == [
        "✓ ranks 0, 2: done, 0 s]",
        "✗ rank 1: ValueError: <i>]",
    ]
    html = output._repr_html_()
    assert html.count('<details open="">') == 2
    assert "<b>" not in html.replace("&lt;b&gt;", "")
    assert "<i>" not in html
    frame = output.to_frame()
    assert frame[["rank", "state"]].to_numpy().tolist() == [[0, "done"], [1, "raised"], [2, "done"]]
    assert frame["value"].fillna("none").tolist() == ["3", "none", "3"]
    output.save(tmp_path / "x.html")
    assert "<h1>✓ ranks 0, 2</h1>" in (tmp_path / "x.html").read_text("utf-8")
    with pytest.raises(KeyError, match="rank 3 did not run this cell; ranks 0, 1, 2 did"):
        output[3]
