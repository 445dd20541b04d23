"""What is no markup is text, wherever it is given."""

from html.parser import HTMLParser

from hypothesis import given
from hypothesis import strategies as st

from workbench.plan.io.html import Markup, element, folded, joined, lines, page, table


class Read(HTMLParser):
    """The tags and the text of a page, as a browser has them."""

    def __init__(self, content):
        super().__init__()
        self.tags, self.text = [], ""
        self.feed(content)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_data(self, data):
        self.text += data


@given(st.text(st.characters(blacklist_categories=["Cc", "Cs"])))
def test_text_is_text_and_attributes_are_one_value(text):
    found = Read(element("p", text, element("b", text), title=text, data_name=text))
    assert found.tags == [("p", {"title": text, "data-name": text}), ("b", {})]
    assert found.text == 2 * text


def test_markup_is_not_escaped_again_and_what_is_made_of_it_by_hand_is():
    inner = element("b", "a & b")
    assert element("p", inner) == "<p><b>a &amp; b</b></p>"
    by_hand = inner + "<script>"
    assert not isinstance(by_hand, Markup)
    assert element("p", by_hand).startswith("<p>&lt;b&gt;")
    assert joined([inner, "<"]) == "<b>a &amp; b</b>&lt;"
    assert lines(["<", inner]) == "&lt;<br><b>a &amp; b</b>"


def test_tables_pages_and_what_is_folded_up_hold_text():
    evil = "<script>"
    parts = [table([evil], [[evil]], evil), folded(evil, element("pre", evil), is_open=True)]
    found = Read(page(evil, parts))
    tags = [tag for tag, _ in found.tags]
    assert "script" not in tags
    assert ("details", {"open": ""}) in found.tags
    assert found.text.count(evil) == 7
