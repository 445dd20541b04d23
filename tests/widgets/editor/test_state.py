"""Patches hold what changed, nothing else, and lead from one state to the other."""

from hypothesis import given
from hypothesis import strategies as st

from tests.widgets.editor.kit import patched
from workbench.widgets.editor.state import Snapshot, difference

CELLS = st.sampled_from([0, 1, "replicate", "shard_out", None])


@st.composite
def states(draw):
    rows = draw(st.integers(0, 5))
    columns = {n: draw(st.lists(CELLS, min_size=rows, max_size=rows)) for n in ("scheme", "group")}
    return Snapshot(columns, draw(st.dictionaries(st.sampled_from("abc"), CELLS, min_size=3)))


@given(states(), states())
def test_a_patch_leads_from_one_state_to_the_other(old, new):
    rows = len(new.columns["scheme"])
    if len(old.columns["scheme"]) != rows:
        old = Snapshot({}, old.values)
    assert patched(old, difference(old, new)) == Snapshot(new.columns, new.values)


def test_a_patch_holds_only_what_changed():
    old = Snapshot({"scheme": ["a", "b", "c"], "group": [1, 2, 3]}, {"rounds": "BK", "undo": None})
    new = Snapshot({"scheme": ["a", "x", "c"], "group": [1, 2, 3]}, {"rounds": "BK", "undo": "x"})
    assert difference(old, new) == {"columns": {"scheme": [[1], ["x"]]}, "values": {"undo": "x"}}
    assert difference(new, new) == {}
