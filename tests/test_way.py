"""The documentation's way of a run: what it names is there, and is reached as it says."""

import importlib
import importlib.util
import re
from itertools import pairwise
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parents[1] / "notebooks" / "docs"
spec = importlib.util.spec_from_file_location("way", DOCS / "way.py")
way = importlib.util.module_from_spec(spec)
spec.loader.exec_module(way)

STATIONS = [station for _, stations, _ in way.WAY for station in stations]
EXTENSIONS = [place for _, place, _ in way.EXTENSIONS]


@pytest.mark.parametrize("place", [*STATIONS, *EXTENSIONS], ids=".".join)
def test_what_is_named_is_there(place):
    room, name = place
    found = importlib.import_module(way.home(room, name))
    for part in name.split("."):
        found = getattr(found, part)
    assert callable(found)


def test_each_station_leads_to_the_next():
    drawn = way.way()
    for room, name in STATIONS:
        assert f">{name}</text>" in drawn
        assert way.home(room, name).rpartition(".")[2] in drawn


def test_a_file_between_two_imports_the_next():
    one, other = way.home("client", "Cluster.train"), way.home("store", "Store.submit")
    chain = [one, *way.between(one, other), other]
    for module, following in pairwise(chain):
        assert following in way.imports(module)
    with pytest.raises(LookupError, match="no chain of imports leads"):
        way.between(other, one)


def test_what_is_gone_is_an_error():
    with pytest.raises(LookupError, match=r"defines Cluster\.fly in no module"):
        way.home("client", "Cluster.fly")


def test_the_page_is_listed_and_shows_both():
    page = "explanation/way-of-a-run.md"
    text = (DOCS / "pages" / page).read_text("utf-8")
    assert re.findall(r"<!-- drawn: (\w+) -->", text) == ["way", "extension_points"]
    assert page in (DOCS / "mkdocs.yml").read_text("utf-8")
    assert way.extension_points().count("\n") == 1 + len(EXTENSIONS)
