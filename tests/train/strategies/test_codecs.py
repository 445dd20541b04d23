"""Training with coded gradients: replicas stay equal, bytes are the codec's, errors name whose."""

import pytest
import torch

from tests.train import small
from tests.train.runs import started, trained
from tests.train.small import GRAPH
from workbench.comm.groups.world import World
from workbench.comm.messages.errors import CodecError, CommError
from workbench.comm.messages.flat import even
from workbench.plan.collective.codec import Codec
from workbench.plan.experiment.experiment import SGD, Experiment, Pipelined, Synchronous, Synthetic
from workbench.plan.plans.plan import Plan
from workbench.program.step import program_of
from workbench.train.step.state import StepState
from workbench.train.strategy.reduction import GradientSum

DATA = Plan.data_parallel(GRAPH, 4)
HYBRID = Plan.hybrid(GRAPH, 4, 2)
FIELDS = dict(
    data=Synthetic(samples=50), batch_size=20, steps=4, optimizer=SGD(lr=0.02, momentum=0.9)
)
FEEDBACK = Codec(name="top_k", fraction=0.1, error_feedback=True)


def parameters(found):
    return {n: v for n, v in found.items() if n in dict(small.net().named_parameters())}


@pytest.mark.parametrize(
    ("plan", "sync", "off"),
    [
        (DATA, Synchronous(codec="int8"), 2e-3),
        (DATA, Synchronous(codec=FEEDBACK, algorithm="ring", bucket_bytes=2000), 0.05),
        (HYBRID, Synchronous(codec="bf16_truncated", bucket_bytes=100), 2e-3),
        (HYBRID.with_rounds("B/K"), Synchronous(codec="fp16", per_round=True), None),
        (DATA, Pipelined(codec="int8", warmup=1), None),
    ],
    ids=["int8", "top_k", "hybrid", "per_round", "pipelined"],
)
def test_replicas_stay_equal_and_near_the_uncoded_run(on_ranks, weights, plan, sync, off):
    run = Experiment(plan=plan, sync=sync, **FIELDS)
    ranks = on_ranks(4, trained, run, weights)
    k = max([1, *(choice.group_size for choice in plan.layers.values())])
    for rank, (found, _, _) in enumerate(ranks):
        mine, same = parameters(found), parameters(ranks[rank % k][0])
        assert all(torch.equal(mine[name], same[name]) for name in mine)
    if off is not None:
        exact, _, _ = on_ranks(4, trained, run.replace(sync=Synchronous()), weights)[0]
        exact, found = parameters(exact), parameters(ranks[0][0])
        errors = [(found[name] - exact[name]).abs().max().item() for name in exact]
        assert 0 < max(errors) < off


def test_what_is_recorded_are_the_codec_s_bytes(on_ranks, weights):
    run = Experiment(plan=DATA, sync=Synchronous(codec="int8"), **FIELDS)
    numel = sum(p.numel() for p in small.net().parameters())
    sizes = [Codec(name="int8").encoded_bytes(n) for n in even(numel, 4)]
    for rank, (_, _, traffic) in enumerate(on_ranks(4, trained, run, weights)):
        received = sum(sizes) - sizes[rank] + 3 * sizes[rank]
        assert ("all_reduce", "gradients", 4 * 6, 4 * received) in traffic


def residuals(world, run, weights):
    """Bytes that a rank keeps between steps, with error feedback and without."""
    state = started(world, run, weights)
    state.stepper.run(0)
    return sum(tensor.nbytes for tensor in state.strategy.buffers)


def test_residuals_are_in_the_account_of_memory(on_ranks, weights):
    with_it, without = (
        on_ranks(4, residuals, Experiment(plan=DATA, sync=Synchronous(codec=c), **FIELDS), weights)
        for c in (FEEDBACK, Codec(name="top_k", fraction=0.1))
    )
    numel = sum(p.numel() for p in small.net().parameters())
    assert [a - b for a, b in zip(with_it, without, strict=True)] == [4 * numel] * 4


def overflowing(config, run, weights):
    """The gradient of one weight is too large for fp16 on rank 2."""
    try:
        with World.open(config) as world:
            state = started(world, run, weights)
            coded = run.replace(sync=Synchronous(bucket_bytes=10**9, codec="fp16"))
            sums = GradientSum(program_of(coded).of(world.rank), state.model)
            sums.zeroing(list(state.model.trainable()))(StepState(0, (1,) * 4, 4))
            for name, parameter in state.model.trainable().items():
                large = world.rank == 2 and name == "8.weight"
                sums.views[name].fill_(1e5 if large else 1.0)
                parameter.grad = sums.views[name]
            sums.start()
            sums.wait()
    except CommError as error:
        return type(error), str(error), getattr(error, "layer", "")


def test_an_overflow_names_rank_and_weight(on_ranks, weights):
    answers = on_ranks.seated(4, overflowing, Experiment(plan=DATA, **FIELDS), weights)
    kind, said, layer = answers[2]
    assert (kind, layer) == (CodecError, "8")
    assert "all_reduce of layer 'gradients'" in said
    assert "rank 2: holds magnitudes up to 65504, and got 1e+05" in said
    assert said.endswith("the largest is in the gradient of '8.weight'")
    for rank in (0, 1, 3):
        assert "rank 2 gave up after CodecError" in answers[rank][1]
