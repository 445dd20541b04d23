"""The memory map without a browser: areas are the prediction's bytes."""

import re

import pytest
import traitlets

import workbench as wb
from tests.plan.graphs import Builder
from tests.widgets.explorers.conftest import MACHINE, predicted
from workbench.widgets.explorers.memory_map import MOST_TILES, grouped, tiles_svg

TILE = re.compile(
    r'<rect x="[\d.]+" y="[\d.]+" width="([\d.]+)" height="([\d.]+)" style="fill:var\(--wb-\w+, '
    r'#\w+\);stroke:[^;]+;stroke-width:1"><title>([^<]+)</title>'
)


def test_figures_add_up_to_the_peak(explore, prediction):
    for by in ("category", "layer"):
        picture = explore(wb.MemoryMap, prediction, by=by).picture()
        total = sum(int(row[2].replace(",", "")) for row in picture.table.rows)
        assert total == prediction.memory[0].peak_bytes


def test_areas_in_a_group_are_to_scale(prediction):
    held = {key: count for key, count in prediction.memory[0].held.items() if count}
    (name, tiles), *_ = grouped(held, "category").items()
    found = TILE.findall(tiles_svg({name: tiles}, "category"))
    assert len(found) == len(tiles)
    areas = [float(width) * float(height) for width, height, _ in found]
    for area, count in zip(areas, tiles.values(), strict=True):
        expected = count / sum(tiles.values())
        assert area / sum(areas) == pytest.approx(expected, rel=0.05, abs=1e-4)


def test_groups_are_looked_into_and_left(explore, prediction):
    explorer = explore(wb.MemoryMap, prediction)
    whole = explorer.drawing.shown["panels"][0]
    explorer.drawing._receive(explorer.drawing, {"type": "pick", "name": "weights"}, [])
    assert explorer.inside == "weights"
    assert explorer.drawing.shown["panels"][0]["note"] != whole["note"]
    assert explorer.drawing.shown["panels"][0]["svg"].count("data-pick") == 1
    explorer.controls["whole"].click()
    assert explorer.drawing.shown["panels"][0] == whole
    explorer.drawing._receive(explorer.drawing, {"type": "pick", "name": "rank 2"}, [])
    assert explorer.rank == 2
    explorer.drawing._receive(explorer.drawing, {"type": "pick", "name": "rank 9"}, [])
    assert "rank must be 0 to 3, got 9" in explorer.drawing.shown["error"]
    assert explorer.rank == 2


def test_the_fullest_rank_is_shown_first(explore):
    plan = wb.Plan.filters(Builder((3, 8, 8)).conv("conv", 64).graph(), 3, shares=(1, 6, 1))
    explorer = explore(wb.MemoryMap, predicted(plan))
    assert explorer.rank == 1
    with pytest.raises(traitlets.TraitError, match="rank must be 0 to 2, got 3"):
        explorer.rank = 3


def test_over_budget_is_said(explore, prediction):
    device = MACHINE.device(0).replace(memory_bytes=100_000)
    small = wb.predict(
        prediction.experiment.plan, MACHINE.replace(devices=(device,)), prediction.experiment
    )
    explorer = explore(wb.MemoryMap, small)
    assert "over its device's 97.7 KiB" in explorer.picture().said[1]
    assert "over!" in explorer.picture().panels[1].svg
    without = wb.predict(prediction.experiment.plan, None, prediction.experiment)
    explorer.prediction = without
    assert len(explorer.picture().said) == 1


def test_another_prediction(explore, prediction):
    explorer = explore(wb.MemoryMap, prediction, rank=3, inside="weights")
    explorer.prediction = prediction.at(world_size=1024)
    assert (explorer.rank, explorer.inside) == (3, "")
    assert "and 1,000 more ranks" in explorer.picture().panels[1].svg


def test_names_are_text_and_many_layers_are_put_together(explore):
    builder = Builder((4, 4, 4))
    for index in range(300):
        builder.conv(f"<i>{index}</i>" + "n" * 200, 4)
    explorer = explore(wb.MemoryMap, predicted(wb.Plan.data_parallel(builder.graph(), 2)))
    svg = explorer.picture().panels[0].svg
    assert "<i>" not in svg
    assert len(TILE.findall(svg)) <= MOST_TILES
    assert "smaller ones" in svg
    assert "<i>" not in explorer.still()


def test_only_predictions(prediction):
    with pytest.raises(TypeError, match=r"MemoryMap takes a Prediction, got Plan"):
        wb.MemoryMap(prediction.experiment.plan)
