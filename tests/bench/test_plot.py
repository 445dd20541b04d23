from xml.etree import ElementTree

from workbench.bench.plot import BARS, Bar, Chart, charts_svg


def drawn(*charts):
    return ElementTree.fromstring(charts_svg(charts))


def test_bars_are_as_long_as_their_medians_say():
    bars = (Bar("ours <&>", 3.0, 2.0, 4.0, True), Bar("theirs", 1.0, 1.0, 1.0))
    found = drawn(Chart("samples/s", bars))
    widths = [float(rect.get("width")) for rect in found.findall("{*}g/{*}rect")]
    assert widths == [BARS, BARS * 3 / 4, BARS, BARS / 4]
    texts = [text.text for text in found.findall("{*}g/{*}text")]
    assert texts == ["samples/s", "ours <&>", "3 (2 .. 4)", "theirs", "1 (1 .. 1)"]


def test_charts_stand_below_each_other():
    bar = Bar("a", 0.0, 0.0, 0.0)
    found = drawn(Chart("one", (bar, bar)), Chart("two", (bar,), target=1.0), Chart("none", ()))
    places = [float(g.get("transform").split()[1].rstrip(")")) for g in found.findall("{*}g")]
    assert places == sorted(set(places))
    assert float(found.get("height")) > places[-1]
    assert len(found.findall("{*}g/{*}path[@stroke-dasharray]")) == 1
