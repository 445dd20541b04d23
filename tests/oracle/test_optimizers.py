"""Optimizers and their groups on ranks, against torch's own in one process, step by step."""

import pytest

from tests.oracle.cases import Case, Cut, Run
from tests.oracle.comparing import judged
from tests.oracle.models import Net

NET = Net(
    (1, 6, 6),
    (
        "self.m1 = nn.Conv2d(1, 4, 3, bias=False)",
        "self.m2 = nn.BatchNorm2d(4)",
        "self.m3 = nn.Linear(64, 6)",
        "self.head = nn.Linear(6, 3)",
    ),
    ("x = self.m2(self.m1(x)).relu()", "x = self.head(self.m3(x.flatten(1)).tanh())"),
)
PARALLEL = Cut(2, rows=(3, 1))
UNEQUAL = Cut(3, (("m3", "shard_out", 3, (3, 0, 1)), ("head", "shard_in", 3, None)))
SQUARE = Cut(4, (("m1", "shard_out", 2, (3, 1)), ("m3", "shard_out", 2, (1, 2))))

OPTIMIZERS = (
    "SGD(lr=0.05, momentum=0.9, dampening=0.5, weight_decay=0.1, maximize=True)",
    "Adam(lr=0.01, amsgrad=True, weight_decay=0.1, decoupled_weight_decay=True)",
    "Adagrad(lr=0.05, lr_decay=0.1, initial_accumulator_value=0.1, weight_decay=0.1)",
    "Adadelta(weight_decay=0.1)",
    "Adamax(lr=0.01, weight_decay=0.1)",
    "NAdam(lr=0.01, weight_decay=0.1)",
    "RAdam(lr=0.01, betas=(0.5, 0.8))",
    "RMSprop(lr=0.01, momentum=0.9, centered=True)",
    "Rprop(lr=0.02)",
    "ASGD(lr=0.05, t0=1.0, lambd=0.1, weight_decay=0.1)",
    "AdamW(lr=0.01, groups=[ParameterGroup('*.bias', weight_decay=0.0, lr=0.05),"
    " ParameterGroup('m3.*', betas=(0.5, 0.5), amsgrad=True)])",
    "SGD(lr=0.05, momentum=0.9, groups=[ParameterGroup(dims=1, momentum=0.0)])",
)


def few(cases, *fast):
    """All cases by name, of which the others are as fast as these, but many."""
    return [
        pytest.param(case, id=name, marks=() if name.startswith(fast) else pytest.mark.slow)
        for name, case in cases.items()
    ]


NAMED = {one: one for one in OPTIMIZERS}
LATE = {one: one for one in OPTIMIZERS if "dampening" not in one}


def is_equal(case, on_ranks):
    verdict = judged(case, on_ranks.seated)
    assert verdict.what == "equal", verdict.why


@pytest.mark.parametrize("optimizer", few(NAMED, "SGD", "ASGD", "RMSprop", "AdamW"))
def test_sharded_and_resumed_under_another_plan(optimizer, on_ranks):
    run = Run(optimizer=optimizer, steps=3, shard=(1, 2, 0), checkpoint_every=1, evaluate_every=1)
    is_equal(Case(NET, UNEQUAL, run, "resumed", Cut(3, rows=(1, 0, 2))), on_ranks)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", few(NAMED, "NAdam", "AdamW"))
def test_with_a_server_and_re_cut(optimizer, on_ranks):
    run = Run(optimizer=optimizer, steps=3, sync="ParameterServer(server=3)", checkpoint_every=1)
    is_equal(Case(NET, SQUARE, run, "re-cut", Cut(4)), on_ranks)


@pytest.mark.parametrize("optimizer", few(LATE, "Rprop", "Adagrad"))
def test_pipelined_and_resumed(optimizer, on_ranks):
    """Stopped before the first update, of which the checkpoint knows nothing but first values."""
    run = Run(optimizer=optimizer, steps=3, sync="Pipelined(width=2)", checkpoint_every=1)
    is_equal(Case(NET, PARALLEL, run, "resumed"), on_ranks)


NORM, VALUE = (("clip_norm", 0.1),), (("clip_value", 0.02),)
CLIPPED = {
    "unequal": Case(NET, UNEQUAL, Run(steps=3, clip=NORM), "resumed", Cut(3)),
    "value": Case(NET, UNEQUAL, Run(steps=3, clip=VALUE, accumulate=2)),
    "duplicates": Case(
        NET,
        Cut(4, (("m3", "shard_out", 2, (3, 1)), ("head", "duplicate", 2, None))),
        Run(clip=NORM),
    ),
    "sharded": Case(NET, SQUARE, Run(steps=3, clip=NORM, shard=(1, 2, 0, 3)), "re-cut", Cut(4)),
    "fused": Case(
        NET, SQUARE, Run(sync="Synchronous(algorithm='direct')", clip=NORM, shard=(1, 2, 1, 3))
    ),
    "fused value": Case(
        NET, SQUARE, Run(sync="Synchronous(algorithm='direct')", clip=VALUE, shard=(1, 2, 1, 3))
    ),
    "server": Case(NET, SQUARE, Run(sync="ParameterServer(server=1)", clip=NORM)),
    "ring": Case(NET, PARALLEL, Run(sync="Synchronous(algorithm='ring')", clip=NORM)),
    "late": Case(
        NET, UNEQUAL, Run(steps=4, sync="Pipelined(width=2, warmup=1)", clip=NORM), "resumed"
    ),
    "later": Case(NET, SQUARE, Run(steps=4, sync="Pipelined(width=3)", clip=NORM, shard=True)),
    "late value": Case(NET, PARALLEL, Run(steps=3, sync="Pipelined(width=2)", clip=VALUE)),
    "too small": Case(NET, PARALLEL, Run(clip=(("clip_norm", 1e3),))),
}


@pytest.mark.parametrize("case", few(CLIPPED, "unequal", "duplicates", "fused", "server", "late"))
def test_clipped(case, on_ranks):
    is_equal(case, on_ranks)


def scheduled(text, optimizer="AdamW(lr=0.01)", **fields):
    return Run(**dict(steps=4, schedule=text, optimizer=optimizer, checkpoint_every=1) | fields)


GROUPED = "SGD(lr=0.1, momentum=0.9, groups=[ParameterGroup('head.*', lr=0.5, momentum=0.5)])"
ONE_CYCLE = "LRScheduler('OneCycleLR', max_lr=0.1, total_steps=4, pct_start=0.5)"
CYCLIC = "LRScheduler('CyclicLR', base_lr=0.01, max_lr=0.1, step_size_up=2)"
SCHEDULED = {
    "warmup": Case(
        NET, UNEQUAL, scheduled("WarmupCosine(warmup=2, total=6, final=0.2)"), "resumed", Cut(3)
    ),
    "groups": Case(NET, PARALLEL, scheduled("WarmupCosine(warmup=1)", GROUPED), "resumed"),
    "steps": Case(
        NET, SQUARE, scheduled("LRScheduler('StepLR', step_size=2)", GROUPED, shard=True), "re-cut"
    ),
    "momentum": Case(NET, PARALLEL, scheduled(ONE_CYCLE, GROUPED), "resumed", Cut(2)),
    "betas": Case(NET, SQUARE, scheduled(CYCLIC, sync="ParameterServer()"), "re-cut", Cut(4)),
    "late": Case(NET, PARALLEL, scheduled(ONE_CYCLE, sync="Pipelined(width=2)"), "resumed"),
    "milestones": Case(
        NET, PARALLEL, scheduled("LRScheduler('MultiStepLR', milestones=(1, 3))", clip=NORM)
    ),
}


@pytest.mark.parametrize("case", few(SCHEDULED, "warmup", "momentum", "betas"))
def test_scheduled(case, on_ranks):
    is_equal(case, on_ranks)


AVERAGED = {
    "unequal": Case(NET, UNEQUAL, scheduled("None", ema=0.5, evaluate_every=1), "resumed", Cut(3)),
    "sharded": Case(
        NET, SQUARE, scheduled("None", "SGD(lr=0.1)", ema=0.5, shard=(1, 2, 0, 3)), "re-cut", Cut(4)
    ),
    "fused": Case(
        NET,
        SQUARE,
        scheduled("None", ema=0.5, sync="Synchronous(algorithm='direct')", shard=True),
        "resumed",
    ),
    "server": Case(
        NET, SQUARE, scheduled("None", ema=0.5, sync="ParameterServer(server=3)"), "re-cut", Cut(4)
    ),
    "late": Case(NET, PARALLEL, scheduled("None", ema=0.5, sync="Pipelined(width=2)"), "resumed"),
    "all": Case(NET, UNEQUAL, scheduled(ONE_CYCLE, GROUPED, ema=0.5, clip=NORM), "re-cut", Cut(3)),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", few(AVERAGED, "unequal", "fused", "all"))
def test_averaged(case, on_ranks):
    is_equal(case, on_ranks)
