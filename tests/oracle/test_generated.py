"""Drawn modules under drawn plans and experiments: equal to one process, or refused by name."""

import warnings

import pytest
from hypothesis import HealthCheck, given, settings

from tests.oracle.cases import Case, Cut, Run
from tests.oracle.comparing import judged
from tests.oracle.generated import cases
from tests.oracle.models import Net

QUICK = 70


def test_drawn_cases_are_computed_as_one_process_would_or_refused(on_ranks):
    verdicts = []

    @settings(
        max_examples=QUICK,
        derandomize=True,
        database=None,
        deadline=None,
        print_blob=False,
        suppress_health_check=list(HealthCheck),
    )
    @given(cases())
    def check(case):
        verdict = judged(case, on_ranks.seated)
        assert verdict.right, verdict.why
        verdicts.append(verdict.what)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch, about what drawn modules do
        check()
    assert verdicts.count("equal") >= 0.8 * len(verdicts)


@settings(max_examples=10, derandomize=True, deadline=None, database=None,
          suppress_health_check=list(HealthCheck))  # fmt: skip
@given(cases())
@pytest.mark.filterwarnings("ignore")
def test_a_case_is_brought_back_by_its_repr(case):
    space = {"Case": Case, "Cut": Cut, "Net": Net, "Run": Run}
    assert eval(repr(case), space) == case
