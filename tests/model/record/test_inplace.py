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


def power(x):
    x **= 2


def remainder(x):
    x %= 0.5


@pytest.mark.parametrize("change", [power, remainder])
def test_augmented_assignment_reaches_every_name_and_view(change):
    def named(self, x):
        x = self.inside(x)
        kept = x
        change(x)
        return x + kept

    def viewed(self, x):
        x = self.inside(x)
        change(x[:, :2])
        return x

    traced(calling(named, inside=nn.Linear(4, 4)), 4)
    traced(calling(viewed, inside=nn.Linear(4, 4)), 4)


def in_turns(x):
    """As Qwen3.5 arranges its frequencies: each part is made of parts of the whole."""
    part = x[:, 0]
    for place in (1, 2):
        part[..., place:4:3] = x[:, place, ..., place:4:3]
    return torch.cat((part, part), -1) + x.sum(1).repeat(1, 2)


def part_of_a_part(x):
    left = x[:, :3]
    inner = left[:, 1:, ::2]
    inner.mul_(2.0)
    inner[..., 0] = left[:, :2, 1]
    return left.sum(1) + x.mean(1)


def by_its_name(x):
    x[:, 1] += x[:, 0]
    first = x[:, 0]
    first.relu_()
    return x.sum(1) + first


def without_gradients(x):
    with torch.no_grad():
        scale = torch.linspace(0.5, 2.0, 16).view(4, 4)
        scale[0].neg_()
        scale[1][2:] = 3.0
    return (x * scale).sum(1)


@pytest.mark.parametrize("call", [in_turns, part_of_a_part, by_its_name, without_gradients])
def test_a_part_is_changed_in_the_whole(call):
    inside = nn.Linear(4, 4)
    traced(calling(lambda self, x: call(self.inside(x)), inside=inside), 4, 4)


def beside(x):
    other = x[:, 0]
    x[:, :2].mul_(2.0)
    return x.sum(1) + other


def by_a_method(x):
    x.select(1, 0).mul_(2.0)
    return x.sum(1)


def one_of_several(x):
    parts = x.unbind(1)
    parts[0].mul_(2.0)
    return parts[1] + x.sum(1)


@pytest.mark.parametrize("call", [beside, by_a_method, one_of_several])
def test_a_part_that_is_seen_otherwise_is_refused(call):
    module = calling(lambda self, x: call(self.inside(x)), inside=nn.Linear(4, 4))
    with pytest.raises(TraceError, match="which lies in the same memory and is read afterwards"):
        trace(module, input_shape=(4, 4))


def both_of(mask, other):
    mask &= other


def either_of(mask, other):
    mask |= other


def one_of(mask, other):
    mask ^= other


def shifted(mask, other):
    number = mask.long()
    kept = number
    number <<= 3
    number >>= other.long()
    number //= 2
    mask.copy_(kept > 1)


@pytest.mark.parametrize("change", [both_of, either_of, one_of, shifted])
def test_augmented_assignment_of_masks(change):
    def forward(self, x):
        x = self.inside(x)
        mask = x > 0.2
        change(mask, x < 0.5)
        return x * mask

    traced(calling(forward, inside=nn.Linear(4, 4)), 4)


def test_a_part_of_a_buffer_that_is_not_trained():
    def forward(self, x):
        return self.inside(x) + self.places.requires_grad_(False)[:, :3].requires_grad_(False)

    model = calling(forward, inside=nn.Linear(4, 3))
    model.register_buffer("places", torch.rand(1, 9))
    traced(model, 4)


def test_a_parameter_that_forward_freezes_is_refused():
    def forward(self, x):
        self.inside.weight.requires_grad_(False)
        return self.inside(x)

    with pytest.raises(TraceError, match=r"whether 'inside.weight' is trained, .* before it is"):
        trace(calling(forward, inside=nn.Linear(4, 3)), input_shape=(4,))


class Recurrent(nn.Module):
    """The last step's output of a recurrent layer, whose states have the batch in dimension 1."""

    def __init__(self, rnn, taken):
        super().__init__()
        self.rnn, self.head, self.taken = rnn(5, 8, 2, batch_first=True), nn.Linear(8, 3), taken

    def forward(self, x):
        return self.head(self.taken(self.rnn(x))[:, -1])


def unpacked(given):
    out, _ = given
    return out


@pytest.mark.parametrize("rnn", [nn.RNN, nn.GRU, nn.LSTM])
def test_a_state_that_nothing_reads_is_left_out(rnn):
    first, second = (
        trace(Recurrent(rnn, taken), input_shape=(6, 5)) for taken in (unpacked, lambda y: y[0])
    )
    kinds = [[(layer.kind, layer.output_shape) for layer in one.layers] for one in (first, second)]
    assert kinds[0] == kinds[1]
    with pytest.raises(TraceError, match="the batch"):
        trace(Recurrent(rnn, lambda given: torch.stack(tuple(given[1]))), input_shape=(6, 5))
