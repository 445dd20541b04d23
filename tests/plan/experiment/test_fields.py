"""The fields of values: their defaults, and where what is valid ends."""

from functools import partial

import pytest
import torch
from torch import nn

from tests.plan.graphs import mlp
from workbench.model.tracing.trace import trace
from workbench.plan.collective.codec import Codec
from workbench.plan.experiment.checks import LossScale
from workbench.plan.experiment.experiment import (
    CIFAR10,
    SGD,
    Experiment,
    LocalSGD,
    ParameterServer,
    Pipelined,
    Synchronous,
    Synthetic,
)
from workbench.plan.experiment.optimizers import OPTIMIZERS, ParameterGroup, RMSprop, Rprop
from workbench.plan.experiment.schedule import WarmupCosine
from workbench.plan.experiment.sync import Strategy, Timing
from workbench.plan.io.errors import ExperimentError
from workbench.plan.plans.plan import Plan
from workbench.train.optimizer.state import build_optimizer

run = partial(
    Experiment,
    **dict(plan=Plan.data_parallel(mlp(4, 3, 2), 2), data=Synthetic(samples=64)),
    **dict(batch_size=64, optimizer=SGD(lr=0.1), steps=1),
)
int8, top_k = partial(Codec, name="int8"), partial(Codec, name="top_k")

EDGES = (
    (Synthetic, "samples", (1,), (0,)),
    (Synthetic, "classes", (2,), (1,)),
    (int8, "chunk", (2, 4), (0, 1, 3)),
    (top_k, "fraction", (1e-9, 1.0), (0.0, 1.1)),
    (Synchronous, "bucket_bytes", (1,), (0,)),
    (LocalSGD, "bucket_bytes", (1,), (0,)),
    (LocalSGD, "every", (1,), (0,)),
    (Pipelined, "bucket_bytes", (1,), (0,)),
    (Pipelined, "width", (1,), (0,)),
    (Pipelined, "warmup", (0,), (-1,)),
    (Pipelined, "compensation_lambda", (0.0,), (-0.1,)),
    (ParameterServer, "bucket_bytes", (1,), (0,)),
    (ParameterServer, "server", (0,), (-1,)),
    (WarmupCosine, "warmup", (0,), (-1,)),
    (WarmupCosine, "total", (1,), (0,)),
    (WarmupCosine, "final", (0.0, 1.0), (-0.1, 1.1)),
    (LossScale, "init_scale", (1e-4, 2.0**127), (0.0, 0.9e-4, 2.0**128)),
    (LossScale, "growth_factor", (1.1,), (1.0, float("inf"))),
    (LossScale, "backoff_factor", (0.1, 0.9), (0.0, 1.0)),
    (LossScale, "growth_interval", (1, 2**31 - 1), (0, 2**31)),
    (Timing, "every", (1,), (0,)),
    (Timing, "late", (0,), (-1,)),
    (Timing, "warmup", (0,), (-1,)),
    (Timing, "temporaries", (0,), (-1,)),
    (SGD, "lr", (1e-9,), (0.0, float("inf"))),
    (SGD, "momentum", (0.0, 0.9), (-0.1, 1.0)),
    (SGD, "dampening", (0.0,), (-0.1,)),
    (SGD, "weight_decay", (0.0,), (-0.1, float("inf"))),
    (OPTIMIZERS["adam"], "betas", ((0.0, 0.9), (0.9, 0.0)), ((-0.1, 0.9), (0.9, 1.0))),
    (OPTIMIZERS["adam"], "eps", (0.0,), (-0.1,)),
    (OPTIMIZERS["adadelta"], "rho", (0.0, 1.0), (-0.1, 1.1)),
    (Rprop, "etas", ((0.1, 1.1), (0.9, 1.1)), ((0.0, 1.2), (1.0, 1.2), (0.5, 1.0))),
    (partial(ParameterGroup, lr=0.1), "dims", (0,), (-1,)),
    (run, "batch_size", (1,), (0,)),
    (run, "steps", (1,), (0,)),
    (run, "epochs", (1,), (0,)),
    (run, "shard_optimizer", ((0.0, 1.0),), ((-1.0, 1.0), (1.0, float("inf")))),
    (run, "ema", (0.1, 0.9), (0.0, 1.0)),
    (run, "clip_norm", (0.1,), (0.0, float("inf"))),
    (run, "clip_value", (0.1,), (0.0, float("inf"))),
    (run, "accumulate", (1, 64), (0,)),
    (run, "seed", (0,), (-1,)),
    (run, "checkpoint_every", (1,), (0,)),
    (run, "evaluate_every", (1,), (0,)),
    (run, "trace_every", (0,), (-1,)),
    (partial(run, precision="fp16"), "loss_scale", (0.1, 2.0**127), (0.0, 2.0**128)),
)


@pytest.mark.parametrize(
    ("made", "field", "valid", "invalid"),
    EDGES,
    ids=[f"{getattr(made, 'func', made).__name__}-{field}" for made, field, *_ in EDGES],
)
def test_where_what_is_valid_ends(made, field, valid, invalid):
    for value in valid:
        assert getattr(made(**{field: value}), field) == value
    for value in invalid:
        with pytest.raises(ExperimentError, match=field):
            made(**{field: value})


BUCKET = dict(bucket_bytes=8_388_608)
CODED = dict(algorithm="auto", codec=None)
DEFAULTS = (
    (Synthetic(), dict(samples=1024, classes=10)),
    (CIFAR10(), dict(root="data", download=False)),
    (Synchronous(), dict(per_round=False) | CODED | BUCKET),
    (LocalSGD(), dict(every=5, momentum="keep") | BUCKET),
    (
        Pipelined(),
        dict(width=2, warmup=0, compensation=None, compensation_lambda=0.04) | CODED | BUCKET,
    ),
    (ParameterServer(), dict(server=0) | BUCKET),
    (WarmupCosine(), dict(warmup=0, total=None, final=0.0)),
    (
        LossScale(),
        dict(init_scale=65_536.0, growth_factor=2.0, backoff_factor=0.5, growth_interval=2000),
    ),
    (
        Timing.of(Strategy()),
        dict(exchanges="gradients", every=1, late=0, warmup=0, momentum="keep", remembers={})
        | dict(keeps_weights=False, temporaries=3, adjusts=False, corrects=False),
    ),
    (
        Experiment(plan=run().plan, data="digits", optimizer="sgd", steps=1),
        dict(loss=None, metrics=None, batch_size=128, epochs=None, tokens=None, sync=Synchronous())
        | dict(shard_optimizer=False, schedule=None, ema=None, clip_norm=None, clip_value=None)
        | dict(precision="fp32", loss_scale=None, accumulate=1, seed=0, checkpoint_every=None)
        | dict(evaluate_every=None, keep_best=None, trace_every=20),
    ),
)


@pytest.mark.parametrize(("value", "defaults"), DEFAULTS, ids=lambda one: type(one).__name__)
def test_what_is_not_given_is_as_documented(value, defaults):
    required = {"kind", "plan", "data", "optimizer", "steps"}
    fields = {name: getattr(value, name) for name in type(value).model_fields}
    assert {name: one for name, one in fields.items() if name not in required} == defaults


@pytest.mark.parametrize("field", ["chunk", "fraction", "error_feedback"])
def test_a_codec_s_name_says_all_of_its_defaults(field):
    defaults = dict(chunk=1024, fraction=0.01, error_feedback=False)
    assert getattr(Codec(name="int8"), field) == defaults[field]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_s_defaults_are_torch_s(name):
    value, parameter = OPTIMIZERS[name](), torch.nn.Parameter(torch.zeros(3))
    theirs = type(build_optimizer(value, [parameter]))([parameter]).defaults
    assert value.options == {option: theirs[option] for option in value.options}


@pytest.mark.parametrize(("samples", "size"), [(64, 64), (65, 64), (63, 64), (10, 3), (1, 1)])
def test_epochs_take_as_many_steps_as_there_are_batches(samples, size):
    given = dict(data=Synthetic(samples=samples), batch_size=size, epochs=3, steps=None)
    batches = len(torch.arange(samples).split(size))
    assert run(**given).steps == 3 * batches
    assert run(**given | dict(steps=3 * batches)).epochs == 3
    with pytest.raises(ExperimentError, match=f"are {3 * batches} steps, got {3 * batches + 1}"):
        run(**given | dict(steps=3 * batches + 1))


LANGUAGE = Plan.data_parallel(
    trace(nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 7)), input_shape=(5,), vocabulary=7), 2
)


@pytest.mark.parametrize(("tokens", "steps"), [(1, 1), (20, 1), (21, 2), (1000, 50)])
def test_tokens_take_as_many_steps_as_read_them(tokens, steps):
    given = dict(plan=LANGUAGE, data="text", batch_size=4, tokens=tokens, steps=None)
    assert run(**given).steps == steps
    assert run(**given | dict(steps=steps)).tokens == tokens
    with pytest.raises(ExperimentError, match=f"by 4 samples of 5 are {steps} steps, got 99"):
        run(**given | dict(steps=99))


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        (dict(tokens=0), "tokens: .*got 0"),
        (dict(tokens=8, epochs=2), "epochs and tokens exclude each other"),
        (
            dict(tokens=8, plan=Plan.data_parallel(mlp(4, 2), 2)),
            "tokens: .* does not give scores of tokens",
        ),
    ],
)
def test_tokens_that_cannot_be(fields, reason):
    with pytest.raises(ExperimentError, match=reason):
        run(**dict(plan=LANGUAGE, data="text", steps=None) | fields)


def test_of_steps_epochs_and_tokens_a_copy_has_the_one_that_is_given():
    first = run(plan=LANGUAGE, data="text", batch_size=4, tokens=100, steps=None)
    assert (first.steps, first.replace(batch_size=2).steps) == (5, 10)
    assert (first.replace(steps=3).steps, first.replace(steps=3).tokens) == (3, None)
    assert first.replace(steps=3).replace(tokens=40).steps == 2
    loaded = Experiment.from_toml(first.to_toml())
    assert (loaded.tokens, loaded.steps) == (100, 5)


FUSED = dict(shard_optimizer=True, sync=Synchronous(algorithm="direct"))


@pytest.mark.parametrize(
    ("fields", "fused"),
    [
        ({}, True),
        (dict(shard_optimizer=(1.0, 2.0)), True),
        (dict(shard_optimizer=False), False),
        (dict(sync=Synchronous(algorithm="ring")), False),
        (dict(sync=Synchronous(algorithm="direct", codec="int8")), False),
        (dict(sync=Pipelined(algorithm="direct")), False),
    ],
)
def test_updates_are_fused_into_direct_sums_of_what_is_exact(fields, fused):
    assert run(**FUSED | fields).fused == fused


def test_the_shares_of_updates_are_one_for_each_rank():
    assert run().optimizer_shares == run(shard_optimizer=True).optimizer_shares == (1.0, 1.0)
    assert run(shard_optimizer=(1.0, 3.0)).optimizer_shares == (1.0, 3.0)


def test_a_plain_optimizer_says_what_it_needs():
    """Passes over memory and temporary tensors, where torch has no kernel for a whole update."""
    assert (SGD(0.1).workspace, SGD(0.1, weight_decay=0.1).workspace) == (0, 0)
    plain, decaying = RMSprop(), RMSprop(weight_decay=0.1)
    assert decaying.workspace == RMSprop(maximize=True).workspace == plain.workspace + 1
