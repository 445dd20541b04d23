"""Parameters saved per rank, against the formula's table."""

import pytest

from workbench.bench.rivals.savings import GROUP_SIZES, figures_of, savings

# In percent, for groups of 2, 4, 8, 16 and 32: P_FC / P (1 - 1/k), from layer sizes by hand.
SMALL = {
    ("small VGG", "all"): (34.7, 52.0, 60.7, 65.0, 67.2),
    ("small VGG", "all but the last"): (34.6, 51.9, 60.5, 64.9, 67.0),
}
OTHERS = {
    ("small VGG, half width", "all"): (34.7, 52.0, 60.7, 65.0, 67.2),
    ("VGG-11, head of 4096", "all"): (33.6, 50.4, 58.8, 63.0, 65.1),
    ("VGG-11, head of 512", "all"): (2.7, 4.1, 4.8, 5.1, 5.3),
    ("vgg11, 1000 classes", "all"): (46.5, 69.8, 81.4, 87.2, 90.2),
    ("vgg11, 10 classes", "all"): (46.4, 69.6, 81.2, 87.0, 89.9),
    ("vgg16, 1000 classes", "all"): (44.7, 67.0, 78.2, 83.8, 86.6),
    ("vgg16, 10 classes", "all"): (44.5, 66.8, 77.9, 83.5, 86.3),
}


@pytest.mark.parametrize(("quick", "expected"), [(True, SMALL), (False, SMALL | OTHERS)])
def test_savings_are_those_of_the_formula(quick, expected):
    rows = savings(quick=quick)
    found = {(row["model"], row["linear layers cut"], row["group"]): row["saved %"] for row in rows}
    table = {
        (*key, k): percent
        for key, values in expected.items()
        for k, percent in zip(GROUP_SIZES, values, strict=True)
    }
    assert found == pytest.approx(table, abs=0.1)
    assert figures_of(rows)["parameters_saved_k4"].median == pytest.approx(52.0, abs=0.1)
