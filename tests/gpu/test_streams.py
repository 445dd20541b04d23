"""Kernels that take long: nothing is read before it is there, nothing is freed in flight."""

import pytest
import torch

from tests.gpu import probe
from tests.oracle.comparing import judged
from tests.oracle.generated import numbered

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
    pytest.mark.filterwarnings("ignore"),  # of torch, about what drawn modules do
]
SEED = 23


@pytest.mark.parametrize("number", range(16))
def test_slow_kernels_change_nothing(on_gpus, number):
    def slowly(size, function, *args, **limits):
        return on_gpus.seated(size, probe.slowly, function, args, **limits)

    verdict = judged(numbered(SEED, number), slowly)
    assert verdict.right, verdict.why
