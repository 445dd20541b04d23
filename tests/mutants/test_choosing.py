"""Which faults are planted."""

from collections import Counter
from pathlib import Path

from tests.mutants.faults import faults
from tests.mutants.planting import LEFT_OUT, chosen, sources

ROOT = Path(__file__).resolve().parents[2]
SOURCE = "def f(a, b):\n    a += b % 2\n    return a[b:], a.clone()\n"


def test_the_seed_decides_and_kinds_and_files_are_even():
    among = [fault for file in "abcd" for fault in faults(SOURCE, file)]
    found = chosen(among, 20, seed=1)
    assert found == chosen(among, 20, seed=1) != chosen(among, 20, seed=2)
    assert len(set(found)) == 20
    assert set(Counter(fault.file for fault in found).values()) == {5}
    first = [fault.kind for fault in found[: len({fault.kind for fault in among})]]
    assert len(set(first)) == len(first)


def test_there_are_no_more_than_there_are():
    among = faults(SOURCE, "a")
    assert sorted(map(str, chosen(among, 10**6, seed=3))) == sorted(map(str, among))


def test_every_pattern_leaves_a_file_out():
    for pattern in (pattern for patterns in LEFT_OUT.values() for pattern in patterns):
        assert list((ROOT / "workbench").glob(pattern)), pattern


def test_every_folder_that_computes_is_looked_at():
    found = sources(ROOT)
    assert {Path(file).parts[1] for file in found} == {"comm", "layers", "train", "program", "plan"}
    assert "workbench/comm/codecs/coders.py" in found
    assert "workbench/plan/plans/table.py" not in found


def test_one_file_of_the_house_has_faults_of_several_kinds():
    file = "workbench/plan/placement/placement.py"
    found = faults((ROOT / file).read_text("utf-8"), file)
    assert len({fault.kind for fault in found}) >= 5
