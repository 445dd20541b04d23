"""What draws random numbers is found when it is traced, and what it draws is as it is written."""

import math
import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.model.traced import calling
from workbench.model import TraceError, trace
from workbench.model.record.draws import Draws, drawing, hashed
from workbench.plan.plans.plan import Plan

TOKENS = (4, 6)


def layers_of(call, shape=TOKENS, **attributes):
    graph = trace(
        calling(lambda self, x: call(self, x).flatten(1), **attributes), input_shape=shape
    )
    return [layer for layer in graph.layers if layer.random]


def heads(x):
    return x.view(-1, 4, 2, 3).transpose(1, 2)


def attended(x, dropout_p):
    return F.scaled_dot_product_attention(heads(x), heads(x), heads(x), dropout_p=dropout_p)


@pytest.mark.parametrize(
    ("call", "draws"),
    [
        (lambda x: F.dropout(x, 0.2), (0,)),
        (lambda x: F.dropout1d(x, 0.2), (0,)),
        (lambda x: F.rrelu(x, training=True), (0,)),
        (lambda x: F.alpha_dropout(x, 0.2, training=True), (0,)),
        (lambda x: attended(x, 0.2), (0,)),
        (lambda x: F.gumbel_softmax(x), (0,)),
        (lambda x: x + torch.randn_like(x), (0,)),
        (lambda x: x * torch.rand(x.shape[0], 1, 1), (0,)),
        (lambda x: x * x.new_empty((x.shape[0], 1, 1)).bernoulli_(0.7), (0,)),
        (lambda x: F.dropout(x.reshape(-1, 3), 0.2).reshape(-1, 24), (0,)),
        (lambda x: x + torch.randn(6), (-1,)),
        (lambda x: x + torch.normal(0.0, 1.0, (4, 6)), (-1,)),
    ],
)
def test_what_draws_is_found(call, draws):
    (layer,) = layers_of(lambda _, x: call(x))
    assert layer.draws == draws


@pytest.mark.parametrize(
    "call",
    [
        lambda x: F.dropout(x, 0.5, training=False),
        lambda x: F.dropout(x, 0.0),
        lambda x: F.dropout1d(x, 0.5, training=False),
        lambda x: F.rrelu(x),
        lambda x: attended(x, 0.0),
    ],
)
def test_what_could_draw_and_does_not_is_not_random(call):
    graph = trace(calling(lambda self, x: call(x).flatten(1)), input_shape=TOKENS)
    assert not any(layer.random or layer.kind == "dropout" for layer in graph.layers)


def recurrent(**options):
    lstm = nn.LSTM(6, 6, 2, batch_first=True, **options)
    return calling(lambda self, x: self.m(x)[0], m=lstm)


@pytest.mark.parametrize(
    ("module", "draws"),
    [
        (nn.TransformerEncoderLayer(6, 2, 8, batch_first=True), [(0,)] * 4),  # of four parts
        (nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True), []),
        (recurrent(dropout=0.3), [(1,)]),
        (recurrent(), []),
        (nn.AlphaDropout(0.2), [(0,)]),
    ],
    ids=["encoder", "encoder without", "lstm", "lstm without", "alpha"],
)  # fmt: skip
def test_modules_that_draw_are_found(module, draws):
    found = layers_of(lambda self, x: self.block(x), block=module)
    assert [layer.draws for layer in found] == draws


def test_the_draws_survive_text():
    graph = trace(nn.Sequential(nn.Linear(6, 4), nn.RReLU(), nn.Flatten()), input_shape=TOKENS)
    plan = Plan.data_parallel(graph, 2)
    assert Plan.from_toml(plan.to_toml(), graph).graph["1"].draws == (0,)
    assert Plan.from_toml(plan.to_toml()).graph == graph


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (lambda x: x + torch.multinomial(x.softmax(-1), 6, True), "multinomial.*gumbel_softmax"),
        (lambda x: x + torch.poisson(x.exp()), "poisson.*torch.bernoulli"),
        (lambda x: x[:, torch.randperm(24)], r"randperm.*torch.rand\(n\).argsort\(\)"),
        (lambda x: x * random.random(), "Python's random"),
        (lambda x: x * float(np.random.rand()), r"numpy\.random"),
        (lambda x: x if torch.rand(1) < 0.5 else 2 * x, "torch.where"),
        (
            lambda x: x + torch.view_as_real(torch.randn_like(x, dtype=torch.complex64))[..., 0],
            "torch.complex",
        ),
    ],
)
def test_what_no_split_could_repeat_is_refused(call, reason):
    with pytest.raises(TraceError, match=reason):
        trace(calling(lambda self, x: call(x.flatten(1))), input_shape=TOKENS)


def seeded(x):
    torch.manual_seed(1)
    return x * torch.rand_like(x)


def forked(x):
    with torch.random.fork_rng(devices=[]):
        return x * torch.rand_like(x)


@pytest.mark.parametrize(
    ("call", "name"), [(seeded, "torch.manual_seed"), (forked, "torch.random.fork_rng")]
)
def test_a_seed_of_the_model_s_own_is_refused(call, name):
    were = torch.manual_seed, torch.random.fork_rng
    with pytest.raises(TraceError, match=rf"{name} in forward: .*Leave it out.*Experiment\(seed"):
        trace(calling(lambda self, x: call(x.flatten(1))), input_shape=TOKENS)
    assert were == (torch.manual_seed, torch.random.fork_rng)


class Counted(Draws):
    """Draws one tensor whose elements are those of sample 3 and of a key."""

    def __init__(self, key):
        super().__init__()
        self.key = key

    def bits(self, shape, device):
        sample = torch.full((), 3)
        return hashed(self.key, sample, torch.arange(shape.numel())).view(shape)


def numpy_bits(key, count):
    """The docstring's words again, in unsigned integers."""

    def mix(z):
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        return z ^ (z >> np.uint64(27))

    golden = np.uint64(0x9E3779B97F4A7C15)
    with np.errstate(over="ignore"):
        first = mix(np.array([3], np.uint64) + np.uint64(key))
        bits = mix(first ^ (np.arange(count, dtype=np.uint64) * golden))
        return bits >> np.uint64(32), mix(bits + golden) >> np.uint64(32)


KEY, COUNT = 0xF00DFEEDDEADBEEF, 20_000
H, W = numpy_bits(KEY, COUNT)
U, V = H / 2**32, (H + 0.5) / 2**32
NORMAL = np.sqrt(-2 * np.log(V)) * np.cos(2 * np.pi * W / 2**32)
EMPTY = torch.empty(COUNT, dtype=torch.float64)


@pytest.mark.parametrize(
    ("draw", "expected"),
    [
        (lambda: EMPTY.clone().bernoulli_(0.3), H >= round(0.7 * 2**32)),
        (lambda: torch.bernoulli(torch.full_like(EMPTY, 0.3)), H >= round(0.7 * 2**32)),
        (lambda: torch.rand(COUNT, dtype=torch.float64), U),
        (lambda: torch.rand(COUNT), np.floor(U * 2**24) / 2**24),
        (lambda: torch.rand(COUNT, dtype=torch.bfloat16), np.floor(U * 2**8) / 2**8),
        (lambda: EMPTY.clone().uniform_(-2, 3), U * 5 - 2),
        (lambda: torch.randn_like(EMPTY), NORMAL),
        (lambda: torch.normal(EMPTY * 0 + 1, EMPTY * 0 + 2), 1 + 2 * NORMAL),
        (lambda: EMPTY.clone().normal_(1, 2), 1 + 2 * NORMAL),
        (lambda: EMPTY.clone().log_normal_(1, 2), np.exp(1 + 2 * NORMAL)),
        (lambda: EMPTY.clone().exponential_(2), -np.log(V) / 2),
        (lambda: EMPTY.clone().cauchy_(1, 2), 1 + 2 * np.tan(np.pi * (V - 0.5))),
        (lambda: EMPTY.clone().geometric_(0.2), np.maximum(1, np.ceil(np.log(V) / np.log(0.8)))),
        (lambda: torch.randint(7, (COUNT,)), H * np.uint64(7) >> np.uint64(32)),
        (lambda: torch.randint(3, 10, (COUNT,)), 3 + (H * np.uint64(7) >> np.uint64(32))),
        (lambda: torch.empty(COUNT).random_(3, 10), 3 + (H * np.uint64(7) >> np.uint64(32))),
        (lambda: F.dropout(torch.ones_like(EMPTY), 0.7), (H >= round(0.7 * 2**32)) / 0.3),
        (lambda: F.rrelu(-torch.ones_like(EMPTY), 0.1, 0.5, True), -(0.1 + 0.4 * U)),
    ],
)
def test_distributions_are_made_as_the_docstring_says(draw, expected):
    with drawing(Counted(KEY)):
        found = draw()
    with torch.inference_mode(), drawing(Counted(KEY)):
        again = draw()
    torch.testing.assert_close(found, again, rtol=1e-14, atol=0.0)  # kernels round by the place
    np.testing.assert_allclose(found.double().numpy(), np.asarray(expected, float), rtol=1e-12)


def test_what_is_drawn_is_normal_and_uniform():
    with drawing(Counted(1)):
        normal, uniform = torch.randn(500, 400).double(), torch.rand(500, 400).double()
    assert normal.mean().item() == pytest.approx(0, abs=0.01)
    for power, moment in ((2, 1), (3, 0), (4, 3), (6, 15)):
        assert normal.pow(power).mean().item() == pytest.approx(moment, abs=0.05 * power)
    assert uniform.min() >= 0
    assert uniform.max() < 1
    bins = torch.histc(uniform, 100, 0, 1)
    assert ((bins - 2000) ** 2 / 2000).sum().item() == pytest.approx(99, abs=60)
    for x in (normal, uniform - 0.5):
        x = x / x.std()
        for shifted in (x[1:] * x[:-1], x[:, 1:] * x[:, :-1]):
            assert shifted.mean().item() == pytest.approx(0, abs=4 / math.sqrt(x.numel()))
