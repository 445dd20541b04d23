"""What instructions call, by hand: a perceptron of 4, 6 and 2 features, six rows on two ranks."""

from dataclasses import replace

import pytest

import workbench as wb
from tests.plan import graphs
from workbench.plan.graph.graph import Weight
from workbench.plan.placement.placement import Conversion, Layout, Partial, Replicate, Shard
from workbench.plan.plans.plan import Plan
from workbench.program.collectives import crossing_of, trained_hidden
from workbench.program.instructions import Reduce
from workbench.program.rows import Rows
from workbench.program.step import program_of

GRAPH = graphs.mlp(4, 6, 2)
PAIR = Plan.data_parallel(GRAPH, 2)
OUT = PAIR.with_layer("fc1", scheme="shard_out", group_size=2)
BOTH = PAIR.with_layer("fc0", scheme="shard_out", group_size=2, shares=(2, 1)).with_layer(
    "fc1", scheme="shard_in", group_size=2, shares=(2, 1)
)
PARAMETERS = 24 + 6 + 12 + 2


def experiment(plan, **fields):
    given = dict(data="digits", optimizer=wb.SGD(lr=0.1), steps=1, batch_size=6)
    return wb.Experiment(plan=plan, **given | fields)


def every(plan, **fields):
    """All calls of a step, in order."""
    program = program_of(experiment(plan, **fields))
    return [call for one in program.instructions for call in program.collectives.of(one)]


def told(calls):
    return [
        (c.op, c.label, c.phase, c.purpose, c.group_size, c.numel.tolist(), c.itemsize)
        for c in calls
    ]


SUMMED = ("all_reduce", "gradients", "step", "replica", 1, [PARAMETERS] * 2, 4)
STATUS = ("all_reduce", "status", "step", "control", 1, [3 + 2] * 2, 8)


def test_data_parallel_sums_all_gradients_and_agrees():
    assert told(every(PAIR)) == [SUMMED, STATUS]
    (gradients, status) = every(PAIR)
    assert gradients.takes.tolist() == [1, 1]
    assert status.takes is gradients.server is None
    assert gradients.every == status.every == 1
    assert gradients.how.buffer
    assert gradients.how.algorithm == "auto"
    assert [list(group) for group in gradients.groups(2)] == [[0, 1]]


def test_a_pair_of_cut_layers_gathers_rows_and_sums_features():
    assert told(every(BOTH)) == [
        ("all_gather", "fc0", "forward", "shard", 2, [12, 12], 4),  # 3 rows of 4 features
        ("reduce_scatter", "fc1", "forward", "shard", 2, [6, 6], 4),  # 3 rows of 2
        ("all_gather", "fc1", "backward", "shard", 2, [6, 6], 4),
        STATUS,  # each rank alone has its part, and so no gradient travels
    ]


@pytest.mark.parametrize(("precision", "width"), [("fp32", 4), ("fp64", 8), ("bf16", 2)])
def test_cut_scores_need_labels_maxima_and_sums(precision, width):
    calls = told(every(OUT, precision=precision))
    wide = max(width, 4)
    assert calls == [
        ("all_gather", "fc1", "forward", "shard", 2, [18, 18], width),
        ("all_gather", "labels", "step", "shard", 2, [3, 3], 8),
        ("all_gather", "fc1", "step", "shard", 2, [6, 6], wide),
        ("all_reduce", "fc1", "step", "shard", 2, [12, 12], wide),
        ("reduce_scatter", "fc1", "backward", "shard", 2, [18, 18], width),
        ("all_reduce", "gradients", "step", "replica", 1, [30, 30], wide),
        STATUS,
    ]


def test_cut_scores_of_smoothed_labels_need_their_sum_too():
    calls = told(every(OUT, loss=wb.CrossEntropy(ignore_index=None, label_smoothing=0.1)))
    assert calls[3] == ("all_reduce", "fc1", "step", "shard", 2, [18, 18], 4)
    assert not [call for call in calls if call[1] == "weights"]


@pytest.mark.parametrize("options", [{}, dict(ignore_index=None, weight=(1.0, 2.0))])
def test_labels_that_count_unequally_are_counted(options):
    calls = told(every(OUT, loss=wb.CrossEntropy(**options)))
    assert ("all_reduce", "weights", "step", "control", 1, [1, 1], 8) in calls
    assert ("all_reduce", "fc1", "step", "shard", 2, [12, 12], 4) in calls


def test_an_own_loss_sees_rows():
    loss = wb.Loss("torch.nn.functional:cross_entropy")
    calls = told(every(OUT, loss=loss))
    assert [call[:3] for call in calls[1:3]] == [
        ("all_to_all", "fc1", "forward"),
        ("all_to_all", "fc1", "backward"),
    ]
    assert calls[1][5] == [6, 6]  # its 1 feature of 6 rows, for 2 features of 3


def test_normalization_over_all_rows_sums_counts_and_statistics():
    builder = graphs.Builder((3, 4, 4)).conv("conv", 4).norm("bn")
    graph = builder.add("flatten", "flatten", (64,)).linear("fc", 2).graph()
    plan = Plan.data_parallel(graph, 4).with_layer(
        "conv", scheme="shard_out", group_size=2, shares=(3, 1)
    )
    calls = told(every(plan.with_batch_norm("synchronized"), batch_size=8))
    assert [call for call in calls if call[1] == "bn"] == [
        ("all_reduce", "bn", "forward", "norm", 2, [4, 2, 4, 2], 4),
        ("all_reduce", "bn", "forward", "norm", 2, [3, 1, 3, 1], 4),
        ("all_reduce", "bn", "backward", "norm", 2, [4, 2, 4, 2], 4),
        ("all_reduce", "bn", "backward", "norm", 2, [3, 1, 3, 1], 4),
    ]
    local = told(every(plan.with_batch_norm("local"), batch_size=8))
    assert not [call for call in local if call[1] == "bn"]
    assert ("all_to_all", "fc", "forward", "shard", 2, [192, 64] * 2, 4) in calls
    assert ("all_to_all", "fc", "backward", "shard", 2, [128] * 4, 4) in calls
    assert ("all_reduce", "gradients", "step", "replica", 2, [87, 29] * 2, 4) in calls
    assert ("all_reduce", "status", "step", "control", 1, [3 + 4] * 4, 8) in calls


def test_a_server_collects_and_hands_out():
    calls = every(PAIR, sync=wb.ParameterServer(server=1))
    whole = "step", "replica", 1, [PARAMETERS] * 2, 4
    assert told(calls) == [
        ("reduce", "gradients", *whole),
        STATUS,
        ("broadcast", "parameters", *whole),
    ]
    assert [calls[0].server.tolist(), calls[2].server.tolist()] == [[0, 1], [0, 1]]


def test_a_server_is_one_rank_of_each_replica_group():
    plan = Plan.data_parallel(GRAPH, 4).with_layer("fc0", scheme="shard_out", group_size=2)
    calls = every(plan, sync=wb.ParameterServer(server=2), batch_size=8)
    served = [(c.group_size, c.server.tolist()) for c in calls if c.op == "reduce"]
    assert served == [(1, [0, 0, 1, 0]), (2, [0, 0, 1, 1])]


def test_owners_hand_out_what_they_have_updated():
    calls = told(every(PAIR, shard_optimizer=True))
    assert calls[-1] == ("all_gather", "parameters", "step", "replica", 1, [20, 24], 4)


def test_weights_are_averaged_every_few_steps():
    calls = every(PAIR, sync=wb.LocalSGD(every=2))
    assert told(calls) == [
        STATUS,
        ("all_reduce", "parameters", "step", "replica", 1, [PARAMETERS] * 2, 4),
    ]
    assert [call.every for call in calls] == [1, 2]
    assert not calls[1].how.buffer


def test_scales_and_norms_are_agreed_upon():
    calls = told(every(PAIR, precision="fp16", clip_norm=1.0))
    assert calls[2:] == [
        ("all_reduce", "unscale", "step", "control", 1, [1, 1], 8),
        ("all_reduce", "clip", "step", "control", 1, [1, 1], 8),
    ]
    by_value = told(every(PAIR, clip_value=1.0))
    assert by_value == [SUMMED, STATUS]


def test_weighted_rows_are_counted():
    loss = wb.Loss("torch.nn.functional:cross_entropy", weights="math:sqrt")
    calls = told(every(PAIR, loss=loss))
    assert ("all_reduce", "weights", "step", "control", 1, [1, 1], 8) in calls


def test_a_codec_travels_only_where_there_are_replicas():
    plan = Plan.data_parallel(GRAPH, 4).with_layer("fc0", scheme="shard_out", group_size=2)
    sync = wb.Synchronous(codec="int8")
    sums = [call for call in every(plan, sync=sync, batch_size=8) if call.label == "gradients"]
    assert [(call.group_size, call.how.codec is sync.codec) for call in sums] == [
        (1, True),
        (2, True),
    ]
    assert [call.how.codec for call in every(PAIR) if call.label == "gradients"] == [None]


def test_what_has_no_replicas_travels_without_a_codec():
    plan = PAIR.with_layer("fc0", scheme="shard_out", group_size=2)
    sums = every(plan, sync=wb.Pipelined(width=2, codec="int8"))
    codecs = {c.group_size: c.how.codec for c in sums if c.label == "gradients"}
    assert codecs[1] is not None
    assert codecs[2] is None


def test_what_is_recomputed_is_gathered_again():
    plan = PAIR.with_layer("fc1", scheme="shard_out", group_size=2).with_recompute("relu0", "fc1")
    gathers = [call for call in told(every(plan)) if call[:3] == ("all_gather", "fc1", "forward")]
    assert gathers == [("all_gather", "fc1", "forward", "shard", 2, [18, 18], 4)] * 2


def test_ranks_that_fill_a_bucket_elsewhere_take_no_part():
    plan = Plan.data_parallel(GRAPH, 4).with_layer(
        "fc0", scheme="shard_out", group_size=2, shares=(1, 0)
    )
    program = program_of(experiment(plan, batch_size=8))
    found = {}
    for one in program.instructions:
        if isinstance(one, Reduce):
            (call,) = program.collectives.of(one)
            assert call.group_size == one.column.group_size
            found.setdefault(call.group_size, []).append(call.takes.tolist())
    assert found[2] == [[1, 0, 1, 0]]
    assert [sum(each) for each in zip(*found[1], strict=True)] == [1, 1, 1, 1]


ROWS_OF_THREE = Rows([1, 2, 3, 0])
WHOLE = Layout(2, Replicate())
SUMMANDS = Layout(2, Partial())
CUT = Layout(2, Shard(1, (3, 2)))
OTHER = Layout(2, Shard(1, (1, 4)))
BY_ROWS = Layout(1, Replicate())
"""Five features on groups of two ranks."""


def crossing(source, target, gradient="same"):
    step = Conversion(source, target, gradient, (5,), 1)
    found = crossing_of(step, ROWS_OF_THREE, 4, "fc")
    return [None if c is None else (c.op, c.phase, c.numel.tolist()) for c in found]


ALL = [15, 15, 15, 15]  # 3 rows of 5 features in either group
PARTS = [9, 6, 9, 6]
OWN = [5, 10, 15, 0]


@pytest.mark.parametrize(
    ("source", "target", "gradient", "calls"),
    [
        (WHOLE, WHOLE, "partial", [None, ("all_reduce", "backward", ALL)]),
        (SUMMANDS, WHOLE, "same", [("all_reduce", "forward", ALL), None]),
        (
            SUMMANDS,
            WHOLE,
            "partial",
            [("all_reduce", "forward", ALL), ("all_reduce", "backward", ALL)],
        ),
        (
            SUMMANDS,
            CUT,
            "same",
            [("reduce_scatter", "forward", PARTS), ("all_gather", "backward", PARTS)],
        ),
        (
            SUMMANDS,
            BY_ROWS,
            "same",
            [("reduce_scatter", "forward", OWN), ("all_gather", "backward", OWN)],
        ),
        (WHOLE, CUT, "same", [None, ("all_gather", "backward", PARTS)]),
        (WHOLE, BY_ROWS, "same", [None, ("all_gather", "backward", OWN)]),
        (CUT, WHOLE, "same", [("all_gather", "forward", PARTS), None]),
        (
            CUT,
            WHOLE,
            "partial",
            [("all_gather", "forward", PARTS), ("reduce_scatter", "backward", PARTS)],
        ),
        (BY_ROWS, WHOLE, "same", [("all_gather", "forward", OWN), None]),
        (
            BY_ROWS,
            WHOLE,
            "partial",
            [("all_gather", "forward", OWN), ("reduce_scatter", "backward", OWN)],
        ),
        (
            CUT,
            OTHER,
            "same",
            [("all_to_all", "forward", PARTS), ("all_to_all", "backward", [3, 12] * 2)],
        ),
        (
            BY_ROWS,
            CUT,
            "same",
            [("all_to_all", "forward", OWN), ("all_to_all", "backward", PARTS)],
        ),
        (
            CUT,
            BY_ROWS,
            "same",
            [("all_to_all", "forward", PARTS), ("all_to_all", "backward", OWN)],
        ),
    ],
)
def test_what_conversions_call(source, target, gradient, calls):
    assert crossing(source, target, gradient) == calls


def test_an_exchange_knows_both_layouts():
    step = Conversion(CUT, OTHER, "same", (5,), 1)
    there, back = crossing_of(step, ROWS_OF_THREE, 4)
    assert (there.how.source, there.how.target) == (CUT, OTHER)
    assert (back.how.source, back.how.target) == (OTHER, CUT)
    assert there.how.rows == ROWS_OF_THREE
    assert (there.group_size, there.purpose, there.itemsize, there.label) == (2, "shard", 4, "")


def test_groups_follow_from_the_purpose():
    plan = Plan.data_parallel(GRAPH, 4).with_layer("fc0", scheme="shard_out", group_size=2)
    calls = {(c.op, c.purpose, c.group_size): c for c in every(plan, batch_size=8)}
    groups = {key: [list(group) for group in c.groups(4)] for key, c in calls.items()}
    assert groups["all_gather", "shard", 2] == [[0, 1], [2, 3]]
    assert groups["all_reduce", "replica", 2] == [[0, 2], [1, 3]]
    assert groups["all_reduce", "replica", 1] == [[0, 1, 2, 3]]
    assert groups["all_reduce", "control", 1] == [[0, 1, 2, 3]]


def test_normalization_of_own_rows_sums_all_channels():
    graph = graphs.Builder((3, 4, 4)).norm("bn").add("flatten", "flatten", (48,)).linear("fc", 2)
    plan = Plan.data_parallel(graph.graph(), 2).with_batch_norm("synchronized")
    calls = [call for call in told(every(plan)) if call[1] == "bn"]
    assert calls == [  # nothing flows back to the model's input
        ("all_reduce", "bn", "forward", "norm", 1, [3 + 1] * 2, 4),
        ("all_reduce", "bn", "forward", "norm", 1, [3] * 2, 4),
    ]


def positions(hidden, *, trained=True):
    """Attention whose bias of positions is a small perceptron's, as in windows of version 2."""
    graph = graphs.Builder((4, 6)).linear("embed", 12).attention("attention", 3).graph()
    table = (
        Weight("attention.cpb_mlp.0.weight", (hidden, 2), trainable=trained),
        Weight("attention.cpb_mlp.0.bias", (hidden,), trainable=trained),
        Weight("attention.cpb_mlp.2.weight", (3, hidden)),
    )
    layers = [
        replace(layer, weights=layer.weights + table) if layer.kind == "attention" else layer
        for layer in graph.layers
    ]
    return replace(graph, layers=tuple(layers))


def test_heads_sum_the_gradient_of_what_positions_have_in_common():
    graph = positions(5)
    heads = Plan.data_parallel(graph, 2).with_layer("attention", scheme="shard_heads")
    both = 2 * 5 + 5
    found = ("all_reduce", "attention", "backward", "shard", 2, [both] * 2, 4)
    assert told(every(heads)).count(found) == 1
    assert trained_hidden(graph["attention"]) == 5
    assert trained_hidden(positions(5, trained=False)["attention"]) == 0
    assert trained_hidden(GRAPH.layers[0]) == 0
    whole = told(every(Plan.data_parallel(graph, 2)))
    assert not [call for call in whole if call[1] == "attention"]
