"""Every case that was ever found to be wrong or refused: what it is now.

`python -m workbench.bench exactness --random N --seed S` prints such cases, made small.
"""

import warnings

import pytest

from tests.oracle.comparing import judged
from tests.oracle.found import EQUAL
from tests.oracle.refused import REFUSED
from tests.oracle.written import WRITTEN


@pytest.mark.parametrize("case", (EQUAL | WRITTEN).values(), ids=EQUAL | WRITTEN)
def test_is_computed_as_one_process_would(case, on_ranks):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        verdict = judged(case, on_ranks.seated)
    assert verdict.what == "equal", verdict.why


@pytest.mark.parametrize(("case", "named"), REFUSED.values(), ids=REFUSED)
def test_is_refused_by_name(case, named, on_ranks):
    verdict = judged(case, on_ranks.seated)
    if "could not create a primitive" in verdict.why:
        pytest.skip("torch has no bf16 for this layer on a processor without AVX-512")
    assert (verdict.what, named in verdict.why) == ("refused", True), verdict
