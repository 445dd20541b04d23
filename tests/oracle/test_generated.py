"""Drawn modules under drawn plans and experiments: equal to one process, or refused by name."""

import warnings

import pytest
from hypothesis import HealthCheck, given, settings

from tests.oracle.cases import Case, Cut, Run
from tests.oracle.comparing import judged
from tests.oracle.generated import cases, numbered
from tests.oracle.models import Net
from tests.oracle.reducing import reduced

TOGETHER, SEED = 8, 0
SETTINGS = dict(
    derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck)
)
pytestmark = pytest.mark.filterwarnings("ignore")  # of torch, about what drawn modules do


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 8 * TOGETHER, TOGETHER))
def test_cases_are_computed_as_one_process_would_or_refused(on_ranks, first):
    """Independent ones; what fails is made small, to be kept in `test_found.py`."""
    for number in range(first, first + TOGETHER):
        case = numbered(SEED, number)
        verdict = judged(case, on_ranks.seated)
        if not verdict.right:
            small = reduced(case, lambda c: not judged(c, on_ranks.seated).right, 40)
            pytest.fail(f"{judged(small, on_ranks.seated).why}\n{small!r}")


@pytest.mark.slow
def test_cases_that_hypothesis_varies_too(on_ranks):
    @settings(max_examples=16, print_blob=False, **SETTINGS)
    @given(cases())
    def check(case):
        verdict = judged(case, on_ranks.seated)
        assert verdict.right, verdict.why

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        check()


@pytest.mark.slow
def test_most_of_what_is_drawn_is_accepted():
    refused = 0
    for number in range(30):
        case = numbered(SEED + 1, number)
        refused += case == Case(case.net)  # nothing else could be drawn
    assert refused <= 3


@pytest.mark.slow
@settings(max_examples=10, **SETTINGS)
@given(cases())
def test_a_case_is_brought_back_by_its_repr(case):
    space = {"Case": Case, "Cut": Cut, "Net": Net, "Run": Run}
    assert eval(repr(case), space) == case
