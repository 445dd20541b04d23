"""The recurrence of late and coarse gradients, against torch's optimizer and the codecs of runs."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.comm.lockstep import run
from workbench.comm.algorithms.flat import Direct
from workbench.comm.codecs import PieceCoding, coder_of
from workbench.plan.collective.codec import Codec
from workbench.widgets.explorers.descent import (
    WORKERS,
    Descent,
    Digits,
    Quadratic,
    Sum,
    coded,
    losses,
    recognised,
    steps_to,
)
from workbench.widgets.explorers.stability import limit

CODECS = [
    Codec(name="fp16"), Codec(name="bf16"), Codec(name="bf16_truncated"),
    Codec(name="int8", chunk=8), Codec(name="int4"), Codec(name="top_k", fraction=0.2),
]  # fmt: skip
CPU = torch.device("cpu")


@settings(max_examples=30, derandomize=True, database=None)
@given(seed=st.integers(0, 1000), length=st.integers(1, 40), codec=st.sampled_from(CODECS))
def test_pieces_are_what_runs_decode(seed, length, codec):
    values = np.random.default_rng(seed).standard_normal(length).astype(np.float32)
    wire = torch.zeros(codec.encoded_bytes(length), dtype=torch.uint8)
    coder, found = coder_of(codec, CPU), torch.zeros(length)
    coder.encode(torch.from_numpy(values), wire)
    coder.decode(wire, found)
    assert coded(values[None], codec)[0].tolist() == found.tolist()


@pytest.mark.parametrize("feedback", [False, True])
def test_sums_are_those_of_runs(feedback):
    codec = Codec(name="int4", error_feedback=feedback)
    generator, workers, length = np.random.default_rng(1), 4, 24
    ours, kept = Sum(codec, workers, length), [torch.zeros(length) for _ in range(workers)]
    for _ in range(3):
        gradients = generator.standard_normal((workers, length)).astype(np.float32)
        flats = [torch.from_numpy(row.copy()) for row in gradients]
        codings = [PieceCoding(coder_of(codec, CPU), CPU, r if feedback else None) for r in kept]
        run([
            Direct().coded_rounds(flat, range(workers), me, coding)
            for me, (flat, coding) in enumerate(zip(flats, codings, strict=True))
        ])  # fmt: skip
        assert np.allclose(ours(gradients), flats[0].numpy(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("width", [1, 2, 4])
@pytest.mark.parametrize("momentum", [0.0, 0.8])
def test_steps_are_those_of_torch_with_late_gradients(width, momentum):
    lr, steps = 0.05, 30
    loss = Quadratic(20.0)
    rows, distance = torch.from_numpy(loss.rows), torch.from_numpy(loss.start.copy())
    w = torch.nn.Parameter(distance)
    optimizer, late, expected = torch.optim.SGD([w], lr=lr, momentum=momentum), [], []
    for _ in range(steps + 1):
        loss = ((rows @ w) ** 2).sum() / 2
        expected.append(loss.item())
        late.append(torch.autograd.grad(loss, w)[0])
        if len(late) == width:
            w.grad = late.pop(0)
            optimizer.step()
    found = losses(Descent(lr, width, momentum, steps=steps))
    assert found == pytest.approx([each / expected[0] for each in expected], rel=1e-4)


@pytest.mark.parametrize("width", [1, 2, 3, 8])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_steps_are_stable_below_the_limit_alone(width, momentum):
    most = limit(width, momentum)
    calm = losses(Descent(0.7 * most, width, momentum, steps=1500))
    wild = losses(Descent(1.3 * most, width, momentum, steps=1500))
    assert calm[-1] < 1e-7
    assert wild[-1] > 1e3


def test_error_feedback_reaches_what_rare_values_alone_do_not():
    plain = Codec(name="int4")
    kept = Codec(name="int4", error_feedback=True)
    exact, coarse, fed = (losses(Descent(0.3, codec=c, steps=60)) for c in (None, plain, kept))
    assert abs(fed[-1] / exact[-1] - 1) < 0.5
    assert coarse[0] == 1.0


def test_steps_until_a_loss_stays_below_a_target():
    assert steps_to((1.0, 0.5, 0.1, 0.2, 0.05), 0.15) == 4
    assert steps_to((1.0, 0.5), 0.15) is None
    assert steps_to((0.1,), 0.15) == 0


def test_the_problem_has_the_curvatures_that_it_says():
    rows = Quadratic(20.0).rows
    matrix = rows.reshape(WORKERS * rows.shape[1], -1)
    curvatures = np.linalg.eigvalsh(matrix.T @ matrix)
    assert (curvatures.max(), curvatures.min()) == (pytest.approx(1.0), pytest.approx(0.05))


def test_gradients_of_digits_are_those_of_torch():
    loss = Digits()
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(640, generator=generator, dtype=torch.float64) / 10
    found = loss.gradients(values.numpy(), 20).sum(axis=0)  # images 2560 to 2687, from 1438
    places = np.arange(20 * 128, 21 * 128) % len(loss._labels)
    images, labels = torch.from_numpy(loss._train[places]), torch.from_numpy(loss._labels[places])
    weights = values.reshape(64, 10).requires_grad_()
    torch.nn.functional.cross_entropy(images @ weights, labels).backward()
    assert found == pytest.approx(weights.grad.reshape(-1).numpy(), abs=1e-6)
    assert loss.loss(loss.start) == pytest.approx(np.log(10))


def test_digits_are_recognised_also_late_and_coarse():
    exact = Descent(0.5, problem="digits", steps=120)
    late = Descent(0.5, 3, codec=Codec(name="int8"), problem="digits", steps=120)
    assert recognised(exact) > 0.85
    assert recognised(late) > 0.85
    assert losses(late) != losses(exact)
    assert recognised(Descent(0.3, steps=1)) is None
