"""The communication matrix without a browser."""

from types import SimpleNamespace

import numpy as np
import pytest
import traitlets

import workbench as wb
from tests.plan import graphs
from tests.widgets.explorers.conftest import predicted
from workbench.widgets.explorers.traffic_picture import folded
from workbench.widgets.units import size


def test_rows_are_what_ranks_receive(explore, prediction):
    explorer = explore(wb.TrafficMatrix, prediction)
    whole = sum(one.bytes / one.every for one in explorer.pairs)
    received = [prediction.traffic.received_bytes(rank) for rank in range(4)]
    assert whole.sum(axis=1).tolist() == received
    assert size(max(received)) in " ".join(explorer._shown["said"])


def test_collectives_phases_and_layers_are_chosen(explore, prediction):
    explorer = explore(wb.TrafficMatrix, prediction)
    explorer._receive(explorer, {"type": "set", "name": "op", "value": "all_gather"}, [])
    assert explorer.op == "all_gather"
    assert {row[0] for row in explorer._shown["table"]["rows"]} == {"all_gather"}
    explorer.phase = "forward"
    assert {row[2] for row in explorer._shown["table"]["rows"]} == {"forward"}
    explorer.layer = "labels"
    assert "None of these sends anything." in explorer._shown["said"]
    with pytest.raises(traitlets.TraitError, match=r"layer is all, .*; got 'nowhere'"):
        explorer.layer = "nowhere"


def test_a_run_is_its_experiment(explore, prediction):
    run = SimpleNamespace(experiment=prediction.experiment)
    explorer = explore(wb.TrafficMatrix, run)
    assert (
        explorer.prediction.traffic
        == wb.predict(prediction.experiment.plan, None, prediction.experiment).traffic
    )
    with pytest.raises(TypeError, match=r"takes a Prediction or a Run, got int"):
        wb.TrafficMatrix(3)


def test_many_ranks_share_cells_and_too_many_are_refused(explore):
    wide = predicted(wb.Plan.data_parallel(graphs.vgg(), 128), batch_size=128)
    explorer = explore(wb.TrafficMatrix, wide)
    assert explorer._shown["panels"][0]["note"] == "4 ranks in a cell"
    assert explorer._shown["panels"][0]["svg"].count("data-cell") == 32 * 32
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
    assert "None of these sends anything." in explorer._shown["said"]
