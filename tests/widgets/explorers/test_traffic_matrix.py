"""The communication matrix without a browser."""

from collections import Counter

import numpy as np
import pytest
import traitlets

import workbench as wb
from tests.plan import graphs
from tests.widgets.explorers.conftest import predicted
from workbench.plan.io.units import size
from workbench.predict.traffic.traffic import pairs_of
from workbench.store.messages import TrainingOutcome
from workbench.widgets.explorers.traffic_matrix import folded


def test_rows_are_what_ranks_receive(explore, prediction):
    explorer = explore(wb.TrafficMatrix, prediction)
    whole = sum(one.bytes / one.every for one in explorer.pairs)
    received = [prediction.traffic.received_bytes(rank) for rank in range(4)]
    assert whole.sum(axis=1).tolist() == received
    assert size(max(received)) in " ".join(explorer.drawing.shown["said"])


def test_collectives_phases_and_layers_are_chosen(explore, prediction):
    explorer = explore(wb.TrafficMatrix, prediction)
    explorer.controls["op"].value = "all_gather"
    assert explorer.op == "all_gather"
    assert {row[0] for row in explorer.drawing.shown["table"]["rows"]} == {"all_gather"}
    explorer.phase = "forward"
    assert {row[2] for row in explorer.drawing.shown["table"]["rows"]} == {"forward"}
    explorer.layer = "labels"
    assert "None of these sends anything." in explorer.drawing.shown["said"]
    with pytest.raises(traitlets.TraitError, match=r"layer is all, .*; got 'nowhere'"):
        explorer.layer = "nowhere"


class Ran:
    """A run that has ended, or not yet."""

    def __init__(self, experiment, outcomes=()):
        self.experiment, self.outcomes, self.told = experiment, outcomes, []

    def subscribe(self, callback):
        self.told.append(callback)
        return lambda: self.told.remove(callback)


def outcomes(pairs, steps, more=0):
    """What ranks count of these pairs, and rank 1 of as much more from rank 0."""
    world = len(pairs[0].bytes)
    given = [Counter() for _ in range(world)]
    for one in pairs:
        for receiver, sender in np.argwhere(one.bytes):
            size = int(one.bytes[receiver, sender]) * steps // one.every
            given[receiver][one.op, one.phase, int(sender)] += size
    given[1]["all_gather", "forward", 0] += more * steps
    return tuple(
        TrainingOutcome("finished", steps, None, given=rows, steps_counted=steps)
        for rows in (tuple((*of, size) for of, size in each.items()) for each in given)
    )


def test_a_run_is_its_experiment_until_it_has_recorded(explore, prediction):
    run = Ran(prediction.experiment)
    explorer = explore(wb.TrafficMatrix, run)
    assert (
        explorer.prediction.traffic
        == wb.predict(prediction.experiment.plan, None, prediction.experiment).traffic
    )
    assert "once it has ended" in explorer.drawing.shown["said"][-1]
    run.outcomes = outcomes(explorer.pairs, 5)
    run.told[0]([])
    titles = [panel["title"] for panel in explorer.drawing.shown["panels"]]
    assert titles == ["As predicted", "As recorded", "By rank"]
    assert explorer.drawing.shown["said"][-1] == (
        "The run recorded exactly that, pair by pair, in 5 steps."
    )
    explorer.op = "all_gather"
    assert "exactly that" in explorer.drawing.shown["said"][-1]
    explorer.layer = next(one.layer for one in explorer.pairs if one.op == "all_gather")
    assert explorer.drawing.shown["said"][-1].endswith("of one layer, the traffic is predicted.")
    explorer.prediction = prediction
    assert explorer.drawing.shown["panels"][0]["title"] == "Bytes of a step"
    explorer.close()
    assert run.told == []


def test_what_was_recorded_otherwise_is_said(explore, prediction):
    pairs = pairs_of(prediction.program)
    explorer = explore(wb.TrafficMatrix, Ran(prediction.experiment, outcomes(pairs, 3, 1 << 30)))
    assert "They differ most from rank 0 to rank 1: " in explorer.drawing.shown["said"][-1]
    two = [TrainingOutcome("finished", 3, None, steps_counted=3)] * 2
    elsewhere = Ran(prediction.experiment, two)
    assert "ended on 2 ranks" in explore(wb.TrafficMatrix, elsewhere).drawing.shown["said"][-1]


def test_only_predictions_and_runs():
    with pytest.raises(TypeError, match=r"takes a Prediction or a Run, got int"):
        wb.TrafficMatrix(3)


def test_many_ranks_share_cells_and_too_many_are_refused(explore):
    wide = predicted(wb.Plan.data_parallel(graphs.vgg(), 128), batch_size=128)
    explorer = explore(wb.TrafficMatrix, wide)
    assert explorer.drawing.shown["panels"][0]["note"] == "4 ranks in a cell"
    assert explorer.drawing.shown["panels"][0]["svg"].count("data-cell") == 32 * 32
    explorer.prediction = wide.at(world_size=1024)
    assert "up to 512 ranks, got 1,024" in explorer.errors[""]
    explorer.prediction = wide
    assert explorer.errors == {}


def test_folded_cells_add_up():
    whole = np.arange(70.0 * 70).reshape(70, 70)
    per, blocks = folded(whole)
    assert (per, blocks.shape) == (3, (24, 24))
    assert blocks.sum() == whole.sum()
    assert blocks[23, 0] == whole[69:, :3].sum()


def test_one_rank_sends_nothing(explore):
    explorer = explore(wb.TrafficMatrix, predicted(wb.Plan.data_parallel(graphs.vgg(), 1)))
    assert "None of these sends anything." in explorer.drawing.shown["said"]
