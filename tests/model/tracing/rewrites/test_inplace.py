"""Which operations change what they read, and which do not, whatever their names end in."""

import pytest
import torch
from torch import nn

from tests.model.traced import calling, traced
from workbench.model import TraceError, trace


@torch.fx.wrap
def squash_(x):
    """A name as of an operation in place, for what changes nothing."""
    return x / (1 + x.abs())


@torch.fx.wrap
def halve(x):
    """A name as of another operation, for one in place."""
    return x.mul_(0.5)


def both(x):
    near, far = x > -0.2, x < 0.4
    inside = near & far
    return x * inside + 2 * x * near


def either(x):
    above, below = x > 0.2, x < -0.4
    return x.masked_fill(above | below, 0.0) + x * above


def seen_through_a_view(x):
    keep = x > 0
    pairs = keep[:, None, :] & torch.ones(4, 4, dtype=torch.bool).tril()[None]
    return (x.unsqueeze(1) * pairs).sum(1) + x * keep


@pytest.mark.parametrize(
    "call", [both, either, seen_through_a_view, lambda x: squash_(x) + x, lambda x: x.abs_() + x]
)
def test_what_is_read_later_is_what_torch_reads(call):
    inside = nn.Linear(4, 4)
    traced(calling(lambda self, x: call(self.inside(x)), inside=inside), 4)


def test_a_function_that_writes_into_what_it_reads_is_refused():
    with pytest.raises(TraceError, match=r"halve writes into a tensor .* x = x.clone\(\)"):
        trace(
            calling(lambda self, x: halve(self.inside(x)), inside=nn.Linear(4, 3)), input_shape=(4,)
        )
