"""What a forward pass leaves in attributes: state is refused, what nothing reads again is not."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from workbench.model import TraceError, trace


class Net(nn.Module):
    """A linear layer, and an attribute `kept` that `forward` gets."""

    def __init__(self, forward, kept=None):
        super().__init__()
        self.linear, self.kept, self.then = nn.Linear(8, 3), kept, forward

    def forward(self, x):
        return self.then(self, self.linear(x))


def anneals(self, y):
    self.kept *= 0.9
    return y / self.kept


def counts(self, y):
    self.kept += 1
    return y


def remembers(self, y):
    y = y if self.kept is None else y + self.kept
    self.kept = y.detach()
    return y


def alternates(self, y):
    self.kept = not self.kept
    return y if self.kept else -y


def counts_inside(self, y):
    self.kept["calls"][0] += 1
    return y


@pytest.mark.parametrize(
    ("forward", "kept"),
    [
        (anneals, 2.0),
        (counts, 0),
        (remembers, None),
        (alternates, False),
        (counts_inside, {"calls": [0]}),
    ],
)
def test_refuses_state(forward, kept):
    with pytest.raises(TraceError, match=r"forward changes the attribute 'kept'.*leave it out"):
        trace(Net(forward, kept), input_shape=(8,))


def leaves(self, y):
    self.kept = y
    return y


def collects(self, y):
    self.kept.append(y)
    return y


def notes_the_shape(self, y):
    self.kept = y.shape[1:]
    return y


@pytest.mark.parametrize(
    ("forward", "kept"), [(leaves, None), (collects, []), (notes_the_shape, None)]
)
def test_takes_what_nothing_reads_again(forward, kept):
    assert [layer.name for layer in trace(Net(forward, kept), input_shape=(8,)).layers] == [
        "linear"
    ]


def test_names_the_part():
    inner = nn.Sequential(Net(counts, 0))
    with pytest.raises(TraceError, match=r"changes the attribute '0\.kept'"):
        trace(inner, input_shape=(8,))


def test_a_pass_that_changes_nothing_is_traced_once_in_each_mode(capsys):
    def says(self, y):
        print("trains" if self.training else "evaluates")
        return y * self.kept.factor

    trace(Net(says, SimpleNamespace(factor=2)), input_shape=(8,))
    # The others are of the module itself, to which what was traced is compared.
    assert capsys.readouterr().out.split()[:2] == ["trains", "evaluates"]


def freezes(self, y):
    self.kept.eval()
    return self.kept(y)


def drops_less(self, y):
    self.kept[0].p = 0.0
    return self.kept(y)


def drops_less_from_then_on(self, y):
    y = self.kept(y)
    self.kept[0].p = 0.0
    return y


def freezes_and_thaws(self, y):
    self.kept.eval()
    y = self.kept(y)
    self.kept.train()
    return y


@pytest.mark.parametrize(
    ("forward", "said"),
    [
        (freezes, "sets kept.0.training, which was True, to False"),
        (drops_less, "sets kept.0.p, which was 0.5, to 0.0"),
        (drops_less_from_then_on, "sets kept.0.p, which was 0.5, to 0.0"),
        (freezes_and_thaws, "sets kept.0.training, which was True, to False"),
    ],
)
def test_refuses_a_layer_that_forward_sets(forward, said):
    with pytest.raises(TraceError, match=said):
        trace(Net(forward, nn.Sequential(nn.Dropout(0.5))), input_shape=(8,))


def test_takes_a_mode_that_no_layer_reads():
    def forward(self, y):
        self.kept.eval()
        return nn.functional.dropout(y, training=self.kept.training)

    graph = trace(Net(forward, nn.Identity()), input_shape=(8,))
    assert not any(layer.draws for layer in graph.layers)


class Caching(nn.Module):
    """Keeps what it makes of its weight while it evaluates, as LeViT's attention does.

    Args:
        throws_away: whether it forgets that when it trains again.
    """

    def __init__(self, throws_away):
        super().__init__()
        self.weight, self.throws_away = nn.Parameter(torch.rand(4)), throws_away
        self.linear, self.made = nn.Linear(4, 3), {}

    def train(self, mode=True):
        super().train(mode)
        if mode and self.throws_away:
            self.made = {}
        return self

    def forward(self, x):
        if self.training:
            return self.linear(x * self.weight.exp())
        if "factor" not in self.made:
            self.made["factor"] = self.weight.exp()
        return self.linear(x * self.made["factor"])


def test_what_is_thrown_away_in_training_is_no_state():
    graph = trace(Caching(True), input_shape=(4,))
    evaluation = graph.evaluation or graph
    assert "exp" in [layer.node for layer in evaluation.layers]


def test_what_is_kept_for_good_is_state():
    with pytest.raises(TraceError, match="forward changes the attribute 'made'"):
        trace(Caching(False), input_shape=(4,))
