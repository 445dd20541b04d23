"""What people bring: innocent data sets, collates and losses are equal, all others are refused."""

import warnings
from dataclasses import replace

import pytest

from tests.oracle.cases import Case, Cut, Run
from tests.oracle.comparing import judged
from tests.oracle.models import Net
from tests.oracle.opaque import DATA, MORE_LOSSES, WRONG_DATA, WRONG_LOSSES

NET = Net(
    (8,),
    ("self.m = nn.Linear(8, 6)", "self.head = nn.Linear(6, 3)"),
    ("x = self.head(torch.tanh(self.m(x)))",),
)
CUT = Cut(2, (("m", "shard_out", 2, (2, 1)), ("head", "shard_in", 2, None)), rows=(2, 1))
RUN = Run(batch_size=7, samples=19, steps=4, accumulate=2, evaluate_every=2)


def verdict(on_ranks, net=NET, cut=CUT, **fields):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return judged(Case(net, cut, replace(RUN, **fields)), on_ranks.seated)


@pytest.mark.parametrize("data", DATA)
def test_innocent_data_is_equal(data, on_ranks):
    found = verdict(on_ranks, data=data)
    assert found.what == "equal", found


@pytest.mark.parametrize("loss", MORE_LOSSES)
def test_an_innocent_loss_is_equal(loss, on_ranks):
    found = verdict(on_ranks, loss=loss)
    assert found.what == "equal", found


@pytest.mark.parametrize("data", WRONG_DATA)
def test_other_data_is_refused(data, on_ranks):
    found = verdict(on_ranks, data=data)
    assert found.what == "refused", found


@pytest.mark.parametrize("loss", WRONG_LOSSES)
def test_another_loss_is_refused(loss, on_ranks):
    found = verdict(on_ranks, loss=loss)
    assert found.what == "refused", found


STATES = {
    "all buffers": ("self.t = nn.BatchNorm1d(8)", "for b in self.buffers(): b += 1"),
    "a clamp": ("self.t = 0", "for p in self.parameters(): p.data.clamp_(-9, 9)"),
    "several at once": (
        "self.t = nn.Linear(3, 3)",
        "torch._foreach_mul_(list(self.t.parameters()), 0.9)",
    ),
    "a teacher": (
        "self.t = copy.deepcopy(self.m)",
        "for p, q in zip(self.t.parameters(), self.m.parameters()): p.lerp_(q, 0.1)",
    ),
    "a state dict": (
        "self.t = copy.deepcopy(self.m)",
        "self.t.load_state_dict(self.m.state_dict())",
    ),
    "a table": (
        "self.t = 0",
        "self.m._parameters['weight'].copy_(F.normalize(self.m._parameters['weight']))",
    ),
    "an object": ("self.t = Calls()", "x = x * self.t.more()"),
    "an iterator": ("self.t = itertools.count()", "x = x * (1 + (next(self.t) > 5))"),
    "a list": ("self.t = [0]", "self.t[0] += 1"),
}


@pytest.mark.parametrize("name", STATES)
def test_a_forward_pass_with_state_is_refused(name, on_ranks):
    init, line = STATES[name]
    forward = ("with torch.no_grad():", f"    {line}", *NET.forward)
    found = verdict(on_ranks, replace(NET, init=(*NET.init, init), forward=forward), Cut(2))
    assert found.what == "refused", found
