"""Pictures are well-formed whatever the names in them are."""

from xml.etree import ElementTree

from workbench.plan.display import svg

NAME = "<script>&\"'"


def test_names_cannot_break_out():
    parts = [
        svg.rect(1, 2, 3, 4, NAME, aria_label=NAME),
        svg.circle(1, 2, 3, NAME),
        svg.path("M0 0L1 1", NAME, stroke="#000"),
        svg.text(0, 0, NAME),
        svg.upwards(0, 0, NAME),
        *svg.legend([(NAME, "#000")], 0, 0, 10),
    ]
    found = ElementTree.fromstring(svg.document([svg.group(parts, data_cell=NAME)], 10, 10))
    assert {title.text for title in found.findall(".//{*}title")} == {NAME}
    assert {text.text for text in found.findall(".//{*}text")} == {NAME}
    assert found[0].get("data-cell") == found[0][0].get("aria-label") == NAME
    assert "<script" not in svg.image("<svg/>", NAME)


def test_coordinates_are_short():
    found = ElementTree.fromstring(svg.rect(1 / 3, -2, 1e6, 0.5))
    assert [found.get(name) for name in ("x", "y", "width", "height")] == [
        "0.33",
        "-2",
        "1000000",
        "0.5",
    ]


def test_a_gap_begins_a_new_line():
    assert svg.polyline([(0, 0), (1, 2), None, (3, 4)]) == "M0.0 0.0L1.0 2.0M3.0 4.0"
