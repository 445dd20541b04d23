"""That operations treat each sample by itself is tried: what mixes is refused, and it alone."""

import random

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.model.traced import calling, traced
from workbench.model import TraceError, build, skeleton, trace

IMAGE = (3, 8, 8)


def refusal(forward, *, shape=IMAGE, **attributes):
    """The reason that is given, without the line of the model's code."""
    with pytest.raises(TraceError) as caught:
        trace(calling(forward, **attributes), input_shape=shape)
    return str(caught.value).split("\n")[0]


@torch.fx.wrap
def centred_over_batch(x):
    return x - x.mean(0, keepdim=True)


@torch.fx.wrap
def square(x):  # the name of an operation that acts on each element
    return x * x.shape[0]


@torch.fx.wrap
def by_quarters_of_the_batch(x):
    return x / (x.shape[0] // 4 + 1)


@torch.fx.wrap
def shuffled(x):
    return x[torch.randperm(x.shape[0])]


@torch.fx.wrap
def scaled_by_chance(x):
    return x * random.random()


@torch.fx.wrap
def thresholded(x):
    return x * (x > x.flatten().median())


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        # copies of the batch one behind the other: a sample's rows are not adjacent
        (lambda x: x.flatten(1).repeat(2, 1), "repeat mixes samples"),
        (lambda x: x.flatten(1).sort(0)[0], "sort mixes samples"),
        (lambda x: x.flatten(1).reshape(-1, 64).roll(1, 0), "roll mixes samples"),
        (lambda x: F.batch_norm(x, None, None, training=True), "batch_norm mixes samples"),
        (lambda x: x[torch.randperm(x.shape[0])], "sort random numbers"),
        (lambda x: centred_over_batch(x), "centred_over_batch mixes samples"),
        (lambda x: thresholded(x), "thresholded mixes samples"),
        (lambda x: shuffled(x), "sort random numbers"),
        (lambda x: scaled_by_chance(x), "forward draws from Python's random"),
    ],
)
def test_what_moves_with_another_sample(call, reason):
    assert reason in refusal(lambda self, x: call(x).flatten(1))


def position(x):
    return torch.arange(x.shape[0])[:, None]


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (lambda x: x.flip(0), "flip gives a sample other results where other samples"),
        (lambda x: x.flatten(1) + position(x), "add gives a sample other results"),
        # of the kind "add", had it been told by its shapes
        (lambda x: x.flatten(1) + position(x).expand(x.shape[0], 192), "add gives a sample"),
        (lambda x: x.flatten(1) * torch.linspace(0, 1, x.shape[0])[:, None], "mul gives a sample"),
        (lambda x: square(x), "square gives a sample other results"),
        (lambda x: by_quarters_of_the_batch(x), "by_quarters_of_the_batch gives a sample"),
        (lambda x: x / (x.shape[0] // 4 + 1), "truediv takes a number that depends on the batch"),
        (lambda x: x.flatten(1)[:, x.shape[0] // 4, None], "getitem takes a number that depends"),
        (
            lambda x: x.flatten(1) * torch.full((x.shape[0], 1), x.shape[0] // 4),
            "full takes a number that depends",
        ),
        (lambda x: x.mean((2, 3), keepdim=True).squeeze(), "shape (3,) for a batch of 1"),
    ],
)
def test_what_depends_on_the_number_of_samples_or_their_places(call, reason):
    assert reason in refusal(lambda self, x: call(x).flatten(1))


@pytest.mark.parametrize(
    "call",
    [
        lambda x: x.flatten(1).repeat_interleave(2, 0).reshape(x.shape[0], -1),
        lambda x: x.flatten(1)[torch.arange(x.shape[0]), :4],
        lambda x: x.reshape(-1, 8)[(torch.arange(x.shape[0]) * 24)[:, None] + torch.arange(4)],
        lambda x: x.flatten(1).gather(1, x.flatten(1).argsort(1)),
        lambda x: F.one_hot(x.flatten(1).argmax(1), 192).float(),
        lambda x: torch.linalg.cholesky(x.flatten(2) @ x.flatten(2).mT + 0.1 * torch.eye(3)),
        lambda x: torch.bernoulli(torch.sigmoid(x)),
        lambda x: torch.acos(torch.tanh(x)),
        lambda x: F.normalize(x, dim=1),
        lambda x: F.embedding((x.flatten(1) > 0).long(), torch.eye(4)),
        lambda x: torch.eye(10)[(x.flatten(1) * 3).long().clamp(0, 9)],
        lambda x: x * torch.ones((x.shape[0], 1, 1, 1)),
        lambda x: x * (torch.rand((x.shape[0], 1, 1, 1)) < 0.5),
        lambda x: x.masked_fill(x > 0, -torch.inf).flatten(1).logsumexp(1, keepdim=True),
    ],
)
def test_what_treats_each_sample_by_itself_is_accepted(call):
    traced(calling(lambda self, x: call(x).flatten(1)), *IMAGE)


@pytest.mark.parametrize(
    ("module", "shape"),
    [
        (nn.GroupNorm(3, 3), IMAGE),
        (nn.ConvTranspose2d(3, 4, 3), IMAGE),
        (nn.InstanceNorm2d(3), IMAGE),
        (nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), (5, 8)),
        (nn.Sequential(nn.Flatten(), nn.Unflatten(1, (5, 8)), nn.Conv1d(5, 2, 3)), (5, 8)),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_modules_of_torch_are_accepted(module, shape):
    trace(calling(lambda self, x: self.block(x).flatten(1), block=module), input_shape=shape)


@pytest.mark.parametrize(("offset", "mixes"), [(5, False), (-8, True)])
def test_indices_are_the_module_s_own(offset, mixes):
    """What they pick may lie in another sample."""

    def forward(self, x):
        own = torch.arange(x.shape[0]) * 192
        return x.reshape(-1)[own[:, None] + self.offset]

    module = calling(forward)
    module.register_buffer("offset", torch.tensor([0, offset]))
    if mixes:
        with pytest.raises(TraceError, match="getitem mixes samples"):
            trace(module, input_shape=IMAGE)
    else:
        trace(module, input_shape=IMAGE)


class Counted(nn.Module):
    """Keeps a running mean of its own."""

    def __init__(self, update):
        super().__init__()
        self.update = update
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x):
        self.update(self)
        return x - self.mean


def write_through_a_view(module):
    module.mean[:2].mul_(0.9)


def assign(module):
    module.mean = module.mean * 0.9


@pytest.mark.parametrize(
    ("module", "shape", "reason"),
    [
        (
            nn.InstanceNorm2d(3, track_running_stats=True),
            IMAGE,
            "forward writes into 'running_mean'",
        ),
        (Counted(write_through_a_view), (4,), "forward writes into 'mean'"),
        (Counted(assign), (4,), "assigns another tensor to 'mean'"),
        (
            nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)),
            (4,),
            "spectral norm in eval mode",
        ),
    ],
)
def test_state_that_a_model_keeps_is_found_by_its_having_changed(module, shape, reason):
    with pytest.raises(TraceError, match=reason):
        trace(module, input_shape=shape)


def test_the_line_of_what_mixes_is_in_the_error():
    def forward(self, x):
        x = x * 2
        x = x.flip(0)  # the line to be found
        return x.flatten(1)

    with pytest.raises(TraceError) as caught:
        trace(calling(forward), input_shape=IMAGE)
    assert str(caught.value).endswith("x = x.flip(0)  # the line to be found")


@torch.fx.wrap
def root_of_negative(x):
    return torch.linalg.cholesky(-1 - x.square().sum(1).reshape(-1, 1, 1)).flatten(1)


def test_what_cannot_be_tried_is_refused():
    said = refusal(lambda self, x: root_of_negative(x.flatten(1)))
    assert "root_of_negative was tried on random values" in said
    assert "it failed (_LinAlgError" in said


def test_the_fewest_rows_that_an_operation_takes():
    def forward(self, x):
        spectrum = torch.fft.rfft2(x).abs()  # torch's fails on no rows
        return self.norm(spectrum.flatten(1)) + self.images(x).flatten(1)[:, :1]

    module = calling(forward, norm=nn.BatchNorm1d(120), images=nn.BatchNorm2d(3))
    graph = trace(module, input_shape=IMAGE)
    least = {layer.name: layer.least_rows for layer in graph.layers if layer.least_rows}
    assert least == {"fft_rfft2": 1, "norm": 2}


def test_torchs_generator_is_left_as_it_was():
    state = torch.get_rng_state()
    trace(calling(lambda self, x: F.alpha_dropout(x, 0.5, True).flatten(1)), input_shape=IMAGE)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.slow
def test_a_module_that_is_traced_again_is_shown_alike():
    graph = trace("shufflenet_v2_x0_5", input_shape=(3, 32, 32))
    assert skeleton(graph) is not None
    assert build(graph.source) is not None


def test_numbers_that_a_file_cannot_hold():
    module = calling(lambda self, x: (x * self.phase).real)
    module.phase = nn.Parameter(torch.ones(4, dtype=torch.complex64))
    with pytest.raises(TraceError, match=r"'phase' holds complex64.*torch.view_as_real"):
        trace(module, input_shape=(4,))


def rotated(x):
    turned = torch.empty_like(x)
    turned[..., 0::2] = -x[..., 1::2]
    turned[..., 1::2] = x[..., 0::2]
    return x + turned


@pytest.mark.parametrize(
    "call",
    [
        rotated,
        lambda x: x + x.new(x.shape[0], 4).zero_(),
        lambda x: x * torch.empty_like(x).fill_(2),
    ],
)
def test_memory_that_is_filled_later_is_not_random(call):
    traced(calling(lambda self, x: call(self.inside(x)), inside=nn.Linear(4, 4)), 4)
