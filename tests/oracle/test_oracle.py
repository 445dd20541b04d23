"""The oracle itself: what it takes the place of is torch's, and it sees what is wrong."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.oracle import oracle
from tests.oracle.cases import Case, Cut, Run
from tests.oracle.comparing import Verdict, judged
from tests.oracle.draws import NOWHERE, Bits, Draws, dims_of, key_of
from tests.oracle.models import HELPERS, Net
from tests.oracle.one_row import read_right
from tests.oracle.oracle import Batch, Step, Task, train

PLAIN = Net(
    (3, 6, 6),
    (
        "self.conv = nn.Conv2d(3, 4, 3, padding=1)",
        "self.norm = nn.BatchNorm2d(4)",
        "self.inner = nn.Linear(144, 8)",
        "self.drop = nn.Dropout(0.3)",
        "self.head = nn.Linear(8, 3)",
    ),
    (
        "x = F.relu(self.norm(self.conv(x)))",
        "x = self.drop(self.inner(torch.flatten(x, 1)))",
        "x = self.head(x)",
    ),
)


def task(net, rows=6, steps=2, ranks=(), **fields):
    generator = torch.Generator().manual_seed(1)
    batches = [
        Batch(
            torch.randn(rows, *net.shape, generator=generator),
            torch.arange(rows) % 3,
            ranks=ranks,
            test_ranks=((rows,),),
        )
        for _ in range(steps)
    ]
    return Task(
        optimizer=lambda ps: torch.optim.SGD(ps.values(), 0.1, 0.9),
        outputs=net.outputs,
        loss=lambda outputs, labels: F.cross_entropy(outputs[0], labels),
        batches=batches,
        test=(batches[0].inputs, batches[0].labels),
        **fields,
    )


def test_a_plain_loop_of_torch_gives_the_same_bits():
    net = Net(PLAIN.shape, PLAIN.init, tuple(f.replace("self.drop", "") for f in PLAIN.forward))
    given = task(net, precision="fp32")
    found = train(net.build(), given)
    module = net.build().train()
    optimizer = torch.optim.SGD(module.parameters(), 0.1, 0.9)
    for batch, step in zip(given.batches, found, strict=True):
        optimizer.zero_grad()
        loss = F.cross_entropy(module(batch.inputs), batch.labels)
        loss.backward()
        optimizer.step()
        assert step.loss == loss.item()
        assert all(torch.equal(p, step.weights[name]) for name, p in module.named_parameters())
        assert all(torch.equal(b, step.buffers[name]) for name, b in module.named_buffers())


def test_micro_batches_draw_what_the_whole_batch_draws():
    net = Net(
        (8,),
        ("self.drop = nn.Dropout(0.4)", "self.head = nn.Linear(8, 3)"),
        ("x = self.head(self.drop(x) + 0.1 * torch.randn_like(x))",),
    )
    draws = {"drop": 1, "randn_like": 1}
    whole, parts = (
        train(net.build().double(), task(net, rows=7, accumulate=n, draws=draws)) for n in (1, 3)
    )
    for one, other in zip(whole, parts, strict=True):
        assert one.loss == pytest.approx(other.loss, rel=1e-12)
        torch.testing.assert_close(one.weights, other.weights, rtol=1e-12, atol=1e-12)


def test_draws_have_their_distributions():
    bits = Bits(key_of(0, 1, "layer", 0), (1000, 300), 0, 0, 1000)
    assert bits.kept(0.3).mean() == pytest.approx(0.3, abs=3e-3)
    uniform, normal = bits.uniform(-1.0, 3.0, 24), bits.normal(1.0, 2.0)
    assert (uniform.mean(), uniform.std()) == pytest.approx((1.0, 4 / 12**0.5), abs=1e-2)
    assert (normal.mean(), normal.std()) == pytest.approx((1.0, 2.0), abs=1e-2)
    assert np.corrcoef(normal[:, :-1].ravel(), normal[:, 1:].ravel())[0, 1] == pytest.approx(
        0, abs=5e-3
    )


def test_a_sample_has_its_draws_wherever_the_batch_lies():
    key = key_of(3, 0, "layer", 0)
    whole = Bits(key, (2, 6, 5), 1, 0, 2).bits
    alone = Bits(key, (2, 3, 5), 1, 1, 1).bits
    assert (whole[:, 3:] == alone).all()
    assert (Bits(key, (4,), NOWHERE, 0, 3).bits == Bits(key, (4,), NOWHERE, 7, 2).bits).all()


def test_what_torch_draws_by_the_way_is_drawn_by_place():
    module = nn.Sequential(nn.Dropout(0.5), nn.AlphaDropout(0.5), nn.RReLU(), HELPERS.Noise(1.0))
    layers = {"0": 1, "1": 1, "2": 1, "randn_like": 1}
    x = torch.randn(4, 5)
    found = []
    for _ in range(2):
        draws = Draws(module, layers, 0, dims_of(module, layers, x))
        draws.start(0, 0, 4)
        with draws:
            found.append(module(x))
    assert torch.equal(*found)


def test_where_the_batch_lies_in_what_is_drawn_is_tried():
    net = Net(
        (3, 4),
        ("self.drop = nn.Dropout(0.4)", "self.head = nn.Linear(4, 3)"),
        (
            "x = self.drop(x.transpose(0, 1)).transpose(0, 1) + torch.rand(4)",
            "x = self.head(self.drop(x).mean(1))",
        ),
    )
    layers = {"drop": 1, "rand": 1, "drop@2": 1}
    assert dims_of(net.build(), layers, torch.randn(5, 3, 4)) == [1, NOWHERE, 0]


def test_local_norms_of_one_group_are_torch_s():
    net = Net(
        (3, 6, 6),
        ("self.norm = nn.BatchNorm2d(3)", "self.head = nn.Linear(3, 3)"),
        ("x = self.head(F.relu(self.norm(x)).mean((2, 3)))",),
    )
    whole = train(net.build().double(), task(net))
    parted = train(net.build().double(), task(net, ranks=((6, 0),), local={"norm": 2}))
    for one, other in zip(whole, parted, strict=True):
        for values, others in ((one.weights, other.weights), (one.buffers, other.buffers)):
            torch.testing.assert_close(values, others, rtol=1e-12, atol=1e-12)


def wrong_steps(case, monkeypatch, change):
    """The oracle's steps are changed, so that the run differs from them."""
    real = oracle.train

    def changed(module, given):
        return [change(step) for step in real(module, given)]

    monkeypatch.setattr(oracle, "train", changed)


@pytest.mark.slow
@pytest.mark.parametrize("what", ["outputs", "gradients", "weights", "buffers", "state"])
def test_whatever_differs_is_seen(what, monkeypatch, on_ranks):
    def change(step: Step) -> Step:
        values = getattr(step, what)
        if what == "outputs":
            return Step(**{**vars(step), what: (values[0] * 1.001,)})
        if what == "state":
            values = {name: {k: v * 1.001 for k, v in s.items()} for name, s in values.items()}
        else:
            values = {name: None if v is None else v * 1.001 for name, v in values.items()}
        return Step(**{**vars(step), what: values})

    case = Case(PLAIN, Cut(2), Run(optimizer="SGD(lr=0.1, momentum=0.9)"))
    assert judged(case, on_ranks.seated) == Verdict("equal")
    wrong_steps(case, monkeypatch, change)
    verdict = judged(case, on_ranks.seated)
    assert verdict.what == "wrong"
    assert {"outputs": "output", "gradients": "gradient", "weights": "weight"}.get(
        what, what.removesuffix("s")
    ) in verdict.why


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("norm", ["batch_norm", "instance_norm"])
def test_one_row_has_the_gradient_that_it_has_among_others(norm, training):
    """Its channels lie innermost in the gradient, which torch itself misreads then."""

    def gradient(x):
        x = x.clone().requires_grad_()
        if norm == "instance_norm":
            y = F.instance_norm(x)
        elif training:  # of one row: with statistics of its own
            y = torch.cat([F.batch_norm(row[None], None, None, training=True) for row in x])
        else:
            y = F.batch_norm(x, torch.zeros(3), torch.full((3,), 4.0))
        (y.flatten(2).transpose(1, 2).flatten(1) @ weights).sum().backward()
        return x.grad

    weights = torch.randn(48, 5, generator=torch.Generator().manual_seed(0))
    rows = torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(1))
    with read_right():
        torch.testing.assert_close(gradient(rows[:1]), gradient(rows)[:1])
