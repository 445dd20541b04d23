"""One's own losses and metrics, under plans that cut what they read, against one process."""

from dataclasses import replace

import pytest

from tests.oracle.cases import Case, Cut, Run
from tests.oracle.losses import LOSSES, OF_CLASSES
from tests.oracle.models import Net
from tests.oracle.test_optimizers import NET, PARALLEL, SQUARE, few, is_equal

HEADS = replace(
    NET,
    init=(*NET.init, "self.aside = nn.Linear(6, 3)"),
    forward=(*NET.forward[:1], "x = self.m3(x.flatten(1)).tanh()"),
    returns="self.head(x), self.aside(x)",
    roles=("prediction", "auxiliary"),
)
WORDS = Net(
    (5,),
    ("self.embed = nn.Embedding(12, 8)", "self.head = nn.Linear(8, 12)"),
    ("x = self.head(self.embed(x).tanh())",),
    vocabulary=12,
)
CLASSES = Cut(3, (("m3", "shard_out", 3, (3, 0, 1)), ("head", "shard_out", 3, (1, 2, 0))))
TOKENS = Cut(3, (("embed", "shard_in", 3, None), ("head", "shard_out", 3, (1, 0, 2))))
PAIR = Cut(4, (("m3", "shard_out", 2, (1, 2)), ("head", "shard_in", 2, None)))
RUN = Run(batch_size=7, samples=19, steps=3, optimizer="AdamW(lr=0.01)", evaluate_every=1)

# A sum over rows may overflow in one process at torch's own first scale, where parts of it do not.
FP16 = dict(precision="fp16", loss_scale="LossScale(init_scale=256.0)")


@pytest.mark.parametrize("loss", LOSSES | OF_CLASSES)
def test_cut_classes_and_micro_batches(loss, on_ranks):
    is_equal(Case(NET, CLASSES, replace(RUN, loss=loss, accumulate=3)), on_ranks)


@pytest.mark.parametrize("loss", LOSSES | OF_CLASSES)
def test_several_outputs(loss, on_ranks):
    is_equal(Case(HEADS, PARALLEL, replace(RUN, loss=loss)), on_ranks)


@pytest.mark.parametrize("loss", LOSSES)
def test_a_cut_vocabulary_on_a_rank_without_rows(loss, on_ranks):
    is_equal(Case(WORDS, replace(TOKENS, rows=(2, 0, 1)), replace(RUN, loss=loss)), on_ranks)


SEEDS = {"ignoring": 0, "weighed": 1}
"""Of the order in which such a sample is the last."""


@pytest.mark.parametrize("loss", ["ignoring", "weighed"])
def test_a_batch_without_labels_has_no_loss_as_in_torch(loss, on_ranks):
    """The second batch is one sample, whose label does not count."""
    flat = Net((2, 8, 8), ("self.head = nn.Linear(128, 3)",), ("x = self.head(x.flatten(1))",))
    run = Run(batch_size=13, samples=14, steps=2, loss=loss, seed=SEEDS[loss])
    is_equal(Case(flat, Cut(2), run), on_ranks)


WAYS = {
    "pipelined and resumed": Case(
        NET, PARALLEL, replace(RUN, sync="Pipelined(width=2)", checkpoint_every=1), "resumed"
    ),
    "a server, re-cut": Case(
        NET, SQUARE, replace(RUN, sync="ParameterServer(server=3)"), "re-cut", Cut(4)
    ),
    "sharded, resumed under another plan": Case(
        NET, CLASSES, replace(RUN, shard=(1, 2, 0)), "resumed", Cut(3, rows=(1, 0, 2))
    ),
    "fused": Case(NET, SQUARE, replace(RUN, shard=True, sync="Synchronous(algorithm='direct')")),
    "clipped": Case(NET, CLASSES, replace(RUN, clip=(("clip_norm", 0.1),))),
    "averaged": Case(HEADS, SQUARE, replace(RUN, ema=0.9)),
    "bf16": Case(NET, SQUARE, replace(RUN, optimizer="SGD(lr=0.05)", precision="bf16")),
    "fp16": Case(NET, PARALLEL, replace(RUN, optimizer="SGD(lr=0.05)", **FP16)),
    "rounds": Case(NET, replace(PAIR, rounds="B"), RUN),
    "recomputed": Case(NET, replace(CLASSES, recompute=("m3",)), RUN),
    "twice": Case(NET, SQUARE, RUN, "again"),
}


@pytest.mark.parametrize("case", few(WAYS, "pipelined", "sharded", "fp16", "rounds"))
@pytest.mark.parametrize("loss", LOSSES)
def test_every_way_of_a_run(case, loss, on_ranks):
    is_equal(replace(case, run=replace(case.run, loss=loss)), on_ranks)
