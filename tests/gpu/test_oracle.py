"""Ranks on GPUs against one process on the CPU: schemes, strategies, codecs, optimizers, re-cuts.

The cases are those of `tests/oracle`, and so is the process that they are compared with.
"""

import pytest
import torch

from tests.oracle.comparing import judged
from tests.oracle.found import EQUAL
from tests.oracle.generated import numbered
from tests.oracle.written import WRITTEN

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
    pytest.mark.filterwarnings("ignore"),  # of torch, about what drawn modules do
]
SEED, TOGETHER, COUNT = 17, 10, 80


@pytest.mark.parametrize("case", (EQUAL | WRITTEN).values(), ids=EQUAL | WRITTEN)
def test_is_computed_as_one_process_would(case, on_gpus):
    verdict = judged(case, on_gpus.seated)
    assert verdict.what == "equal", verdict.why


@pytest.mark.parametrize("first", range(0, COUNT, TOGETHER))
def test_cases_are_computed_as_one_process_would_or_refused(on_gpus, first):
    found = {n: judged(numbered(SEED, n), on_gpus.seated) for n in range(first, first + TOGETHER)}
    assert {n: one.why for n, one in found.items() if not one.right} == {}
