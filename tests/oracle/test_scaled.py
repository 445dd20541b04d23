"""fp16 with its loss scale, under any plan: what a loop with torch's own GradScaler computes.

The scale is equal in every step, and so is which steps it skips; all else is to the rounding of
fp16. Most begin with a scale that overflows: two steps update nothing, and later ones grow it.
"""

from dataclasses import replace

import pytest

from tests.oracle.cases import Case, Cut, Run
from tests.oracle.comparing import judged
from tests.oracle.models import Net

IMAGES = Net(
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
        "x = self.drop(F.relu(self.inner(torch.flatten(x, 1))))",
        "x = self.head(x)",
    ),
)
TOKENS = Net(
    (4, 8),
    (
        "self.norm = nn.LayerNorm(8)",
        "self.attend = nn.MultiheadAttention(8, 2, batch_first=True)",
        "self.head = nn.Linear(32, 3)",
    ),
    (
        "y = self.norm(x)",
        "x = x + self.attend(y, y, y, need_weights=False)[0]",
        "x = self.head(torch.flatten(x, 1))",
    ),
)
OVERFLOWS = "LossScale(init_scale=2.0**32, backoff_factor=2.0**-9, growth_interval=3)"
MOMENTUM = "SGD(lr=0.05, momentum=0.9)"
RUN = Run(
    steps=7,
    optimizer=MOMENTUM,
    precision="fp16",
    loss_scale=OVERFLOWS,
    evaluate_every=3,
    ema=0.9,
)
PAIR = Cut(4, (("inner", "shard_out", 2, None), ("head", "shard_in", 2, None)))
UNEQUAL = Cut(
    3, (("conv", "shard_out", 3, (2, 0, 1)), ("inner", "shard_out", 3, (0, 3, 1))), rows=(2, 0, 1)
)

CASES = {
    "alone": Case(IMAGES, Cut(1), RUN),
    "torch's own first scale": Case(IMAGES, Cut(2), replace(RUN, loss_scale="None")),
    "a first scale that is no power of two": Case(
        IMAGES,
        Cut(2),
        replace(RUN, loss_scale="LossScale(init_scale=3e10, backoff_factor=1e-3)", steps=4),
    ),
    "data parallel": Case(IMAGES, Cut(3), RUN),
    "layers cut in pairs": Case(IMAGES, PAIR, RUN),
    "unequal and zero shares": Case(IMAGES, UNEQUAL, RUN),
    "attention by heads": Case(TOKENS, Cut(2, (("attend", "shard_heads", 2, None),)), RUN),
    "micro-batches": Case(IMAGES, PAIR, replace(RUN, accumulate=3)),
    "rounds": Case(IMAGES, replace(PAIR, rounds="B"), RUN),
    "rounds of the whole": Case(IMAGES, replace(PAIR, rounds="B/K"), replace(RUN, accumulate=2)),
    "recomputed": Case(IMAGES, replace(PAIR, recompute=("inner",)), RUN),
    "clipped by norm": Case(IMAGES, PAIR, replace(RUN, clip=(("clip_norm", 0.1),))),
    "clipped by value": Case(IMAGES, PAIR, replace(RUN, clip=(("clip_value", 0.01),))),
    "by the ring": Case(
        IMAGES, Cut(3), replace(RUN, sync="Synchronous(algorithm='ring', bucket_bytes=64)")
    ),
    "by halving and doubling": Case(
        IMAGES, Cut(3), replace(RUN, sync="Synchronous(algorithm='halving_doubling')")
    ),
    "by torch's backend": Case(IMAGES, PAIR, replace(RUN, sync="Synchronous(algorithm='backend')")),
    "sharded optimizer": Case(IMAGES, PAIR, replace(RUN, shard=True)),
    "unequally sharded": Case(IMAGES, Cut(3), replace(RUN, shard=(2, 0, 1))),
    "fused": Case(IMAGES, PAIR, replace(RUN, shard=True, sync="Synchronous(algorithm='direct')")),
    "fused unequally": Case(
        IMAGES,
        Cut(3),
        replace(RUN, shard=(0, 1, 2), sync="Synchronous(algorithm='direct', bucket_bytes=200)"),
    ),
    "a server": Case(IMAGES, PAIR, replace(RUN, sync="ParameterServer(server=3)")),
    "a pipeline of one": Case(IMAGES, Cut(2), replace(RUN, sync="Pipelined(width=1)")),
    "groups and a schedule": Case(
        IMAGES,
        Cut(2),
        replace(
            RUN,
            optimizer="SGD(lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1, "
            "groups=[ParameterGroup('head.*', lr=0.02), ParameterGroup(dims=1, weight_decay=0.0)])",
            schedule="LRScheduler('StepLR', step_size=3, gamma=0.5)",
        ),
    ),
    "resumed": Case(IMAGES, PAIR, RUN, "resumed"),
    "resumed, under another plan": Case(IMAGES, PAIR, RUN, "resumed", replace(UNEQUAL, world=3)),
    "re-cut": Case(IMAGES, PAIR, RUN, "re-cut", Cut(4, (("inner", "shard_in", 4, None),))),
    "re-cut, fused": Case(
        IMAGES,
        PAIR,
        replace(RUN, shard=True, sync="Synchronous(algorithm='direct')"),
        "re-cut",
        Cut(4),
    ),
    "again": Case(IMAGES, PAIR, RUN, "again"),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_is_computed_as_one_process_would(case, on_ranks):
    verdict = judged(case, on_ranks.seated)
    assert verdict.what == "equal", verdict.why


def test_a_sum_over_all_rows_may_overflow_where_sums_over_some_do_not(on_ranks):
    """The weight's gradient, which fp16 cannot hold, is that of one process, and of no rank."""
    net = Net(
        (2, 8, 8),
        ("self.head = nn.Linear(128, 3, bias=False)",),
        (
            "x = x.flatten(2).transpose(1, 2)",
            "x = torch.sqrt(x.square() + 0.1) + x",
            "x = self.head(torch.flatten(x, 1))",
        ),
    )
    run = Run(
        batch_size=10, samples=24, steps=2, precision="fp16", accumulate=2, optimizer=MOMENTUM
    )
    verdict = judged(Case(net, Cut(3), run), on_ranks.seated)
    assert verdict.what == "invalid", verdict
    assert "rounding" in verdict.why
