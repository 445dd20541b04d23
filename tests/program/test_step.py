"""The instructions of a step: of every strategy, in rounds, in micro-batches, of large worlds."""

from itertools import pairwise, permutations

import pytest

import workbench as wb
from tests.plan import graphs
from tests.train.strategies.own import SlowMo
from workbench.plan.experiment.experiment import ParameterServer, Pipelined
from workbench.plan.io.errors import MachineError, PlanError
from workbench.plan.plans.plan import Plan
from workbench.program.instructions import (
    Backward,
    Convert,
    Forward,
    HandOut,
    Load,
    Loss,
    Prefetch,
    Recompute,
    Reduce,
    Update,
    Wait,
)
from workbench.program.step import program_of

GRAPH = graphs.vgg()
PAIRS = Plan.hybrid(GRAPH, 4, 2)


def experiment(plan, **fields):
    given = dict(data="digits", optimizer=wb.SGD(lr=0.1), steps=1, batch_size=32)
    return wb.Experiment(plan=plan, **given | fields)


def words(program, *of):
    """The kinds of its instructions, one for each run of equal ones."""
    every = [one.word for one in program.instructions if not of or one.word in of]
    return [word for before, word in pairwise(["", *every]) if word != before]


ENDS = {
    "synchronous": ({}, ["wait", "agree", "update"]),
    "in parts": (dict(shard_optimizer=True), ["wait", "agree", "update", "hand_out"]),
    "pipelined": (dict(sync=Pipelined(width=2)), ["wait", "agree", "reduce", "update"]),
    "compensated": (
        dict(sync=Pipelined(width=3, compensation="delay")),
        ["wait", "agree", "reduce", "adjust", "update"],
    ),
    "scaled": (dict(precision="fp16"), ["wait", "agree", "unscale", "update"]),
    "scaled, clipped, in parts": (
        dict(precision="fp16", clip_norm=1.0, shard_optimizer=True),
        ["wait", "agree", "unscale", "clip", "update", "hand_out"],
    ),
    "server": (dict(sync=ParameterServer()), ["wait", "agree", "update", "hand_out"]),
    "local": (
        dict(sync=wb.LocalSGD(every=3)),
        ["backward", "rescale", "agree", "update", "average"],
    ),
}


@pytest.mark.parametrize(("fields", "end"), ENDS.values(), ids=ENDS.keys())
def test_steps_end_as_their_strategy_does(fields, end):
    assert words(program_of(experiment(PAIRS, **fields)))[-len(end) :] == end


def test_every_layer_runs_forward_and_back_and_in_this_order():
    program = program_of(experiment(Plan.data_parallel(GRAPH, 2)))
    forward = [i.operation.label for i in program.instructions if isinstance(i, Forward)]
    backward = [i.operation.label for i in program.instructions if isinstance(i, Backward)]
    assert forward == [layer.name for layer in GRAPH.layers]
    assert backward == [name for name in reversed(forward) if name in GRAPH.learning]
    assert isinstance(program.instructions[0], Load)


def test_gradients_begin_to_travel_behind_the_instruction_that_completes_them():
    sync = wb.Synchronous(bucket_bytes=1)
    program = program_of(experiment(Plan.data_parallel(GRAPH, 2), sync=sync))
    reduces = [(i, one) for i, one in enumerate(program.instructions) if isinstance(one, Reduce)]
    for index, reduce in reduces:
        (after,) = set(reduce.after)
        made = program.instructions[after]
        assert isinstance(made, Backward)
        assert after < index
        assert reduce.column.names <= {weight.name for weight in made.operation.layer.weights}
    (wait,) = (one for one in program.instructions if isinstance(one, Wait))
    assert wait.reduces == tuple(index for index, _ in reduces)
    assert wait.late == 0


def test_late_sums_are_awaited_so_many_steps_later():
    program = program_of(experiment(PAIRS, sync=Pipelined(width=3)))
    (wait,) = (one for one in program.instructions if isinstance(one, Wait))
    assert wait.late == 2
    assert all(isinstance(program.instructions[index], Reduce) for index in wait.reduces)


def test_what_a_strategy_remembers_is_there_from_the_first_step():
    program = program_of(experiment(PAIRS, sync=wb.OwnStrategy(SlowMo(warmup=4))))
    assert (program.remembered, program.warm.remembered, program.at(0).remembered) == (2, 2, 2)
    assert program_of(experiment(PAIRS, sync=wb.LocalSGD(every=3))).remembered == 0


def test_micro_batches_travel_once_and_add_up():
    program = program_of(experiment(PAIRS, accumulate=3))
    backward = [one for one in program.instructions if isinstance(one, Backward)]
    assert {(one.on.micro_batch > 0) for one in backward if one.adds} == {True}
    first = next(i for i, one in enumerate(program.instructions) if isinstance(one, Reduce))
    assert all(
        one.on.micro_batch == 2
        for one in program.instructions[first:]
        if isinstance(one, Backward | Convert)
    )
    rows = [one.on.rows.own.sum() for one in program.instructions if isinstance(one, Loss)]
    assert sum(rows) == program.instructions[0].rows.own.sum() == 32


def test_rounds_gather_the_next_rows_ahead():
    program = program_of(experiment(PAIRS.with_rounds("B/K")))
    numbers = [
        (one.word, one.on.round) for one in program.instructions if isinstance(one, Prefetch | Loss)
    ]
    assert numbers == [("prefetch", 0), ("prefetch", 1), ("loss", 0), ("loss", 1)]
    taken = [one for one in program.instructions if isinstance(one, Convert) and one.prefetch]
    for one in taken:
        begun = program.instructions[one.prefetch]
        assert (begun.operation, begun.on) == (one.operation, one.on)
    assert {one.on.round for one in taken} == {0, 1}


def test_in_rounds_all_but_the_first_pass_add():
    program = program_of(experiment(PAIRS.with_rounds("B/K"), accumulate=3))
    backward = [one for one in program.instructions if isinstance(one, Backward)]
    assert {(one.on.micro_batch, one.on.round) for one in backward} == {
        (micro_batch, number) for micro_batch in range(3) for number in (None, 0, 1)
    }
    for one in backward:
        if one.operation.layer is not None and one.operation.layer.weights:
            assert one.adds == (one.on.micro_batch > 0 or (one.on.round or 0) > 0), one


def test_sums_begin_in_the_last_round():
    """Those of the tail behind its last backward pass, and the head's behind its own."""
    sync = wb.Synchronous(bucket_bytes=1)
    plan = Plan.data_parallel(GRAPH, 4).with_layer("fc0", scheme="shard_out", group_size=2)
    instructions = program_of(experiment(plan.with_rounds("B"), sync=sync)).instructions
    reduces = [one for one in instructions if isinstance(one, Reduce)]
    assert len(reduces) == 8  # of four layers, weights and biases
    rounds = {}
    for one in reduces:
        (after,) = set(one.after)
        made = instructions[after]
        assert isinstance(made, Backward)
        rounds.setdefault(made.operation.label, set()).add(made.on.round)
    assert rounds == {"fc2": {1}, "fc1": {1}, "fc0": {1}, "conv": {None}}


def test_a_round_can_be_a_step_of_its_own():
    sync = wb.Synchronous(per_round=True)
    program = program_of(experiment(PAIRS.with_rounds("B"), sync=sync, shard_optimizer=True))
    updates = [set(one.parameters) for one in program.instructions if isinstance(one, Update)]
    assert updates[0] == updates[1]
    assert not updates[0] & updates[2]
    assert updates[0] | updates[2] == set(program.pieces.names)
    handed = [one.buckets for one in program.instructions if isinstance(one, HandOut)]
    assert len(handed) == 3


def test_nothing_moves_after_a_round_without_rows():
    sync = wb.Synchronous(per_round=True)
    run = experiment(Plan.hybrid(GRAPH, 4, 4).with_rounds("B"), sync=sync, batch_size=2)
    assert sum(isinstance(one, Update) for one in program_of(run).instructions) == 2 + 1


def test_a_segment_runs_again_just_before_its_backward_pass():
    plan = PAIRS.with_recompute("*")
    instructions = program_of(experiment(plan)).instructions
    again = [(i, one) for i, one in enumerate(instructions) if isinstance(one, Recompute)]
    assert {one.segment for _, one in again} == set(range(len(plan.segments)))
    for index, one in again:
        following = instructions[index + 1]
        assert isinstance(following, Backward | Convert)
        assert following.operation.segment == one.segment


def test_programs_are_equal_whose_ranks_do_the_same():
    one, same = (program_of(experiment(PAIRS)) for _ in range(2))
    assert one == same
    assert hash(one) == hash(same)
    assert one.instructions == same.instructions
    assert one == program_of(experiment(PAIRS, seed=5, steps=9))  # one step is as the other
    for other in (dict(batch_size=36), dict(accumulate=2), dict(sync=wb.LocalSGD())):
        assert one != program_of(experiment(PAIRS, **other))


def test_few_ranks_stand_for_a_large_world():
    far = experiment(PAIRS.with_world_size(65_536), batch_size=2**17)
    program = wb.program(far)
    assert len(program.instructions) == len(wb.program(experiment(PAIRS)).instructions)
    assert program.instructions[0].rows.world_size == 4
    assert "65,536 ranks, for which 4 stand" in str(program)
    assert "rank 65535 of 65,536" in str(program.of(65_535))


def test_each_instruction_is_one_line():
    program = wb.program(experiment(PAIRS, sync=wb.Synchronous(bucket_bytes=1)))
    title, *lines = str(program).splitlines()
    assert repr(program) == f"<Program {title}>"
    assert len(lines) == len(program.instructions)
    for index, (line, one) in enumerate(zip(lines, program.instructions, strict=True)):
        assert line.split()[:2] == [str(index), one.word]
    html = program._repr_html_()
    assert html.count("<tr>") == len(lines) + 1
    assert "<script" not in html


def test_it_is_said_what_hangs_on_gradients_that_are_numbers():
    (line,) = [line for line in str(wb.program(experiment(PAIRS, precision="fp16"))).splitlines()
               if " unscale " in line]  # fmt: skip
    assert "nothing follows unless all are numbers" in line
    assert "all_reduce 1" in line


def test_one_rank_s_lines_are_those_in_which_it_takes_part():
    plan = Plan.data_parallel(GRAPH, 4).with_layer(
        "fc1", scheme="shard_out", group_size=2, shares=(1, 0)
    )
    program = wb.program(experiment(plan, sync=wb.Synchronous(bucket_bytes=1)))
    with_it, without = (str(program.of(rank)) for rank in (0, 1))
    assert "fc1.weight, " in with_it or "fc1.weight  " in with_it
    reduces = [text.count(" reduce ") for text in (with_it, without)]
    assert reduces[0] > reduces[1] > 0
    assert "rank 1 of 4" in without.splitlines()[0]
    assert "<table" in program.of(1)._repr_html_()


def calls(run, rank, ranks_per_host=None):
    """(op, label, size of groups) of what a rank calls."""
    found = program_of(run, ranks_per_host).of(rank).calls()
    return [(call.op, call.label, call.group_size) for call in found]


STATUS = ("all_reduce", "status", 1)
SMALL = Plan.data_parallel(graphs.mlp(4, 6, 2), 2)


def test_a_rank_begins_a_sum_when_its_own_gradients_are_there():
    sync = wb.Synchronous(bucket_bytes=1)
    found = list(program_of(experiment(SMALL, sync=sync)).of(1).calls())
    sizes = [call.numel.tolist() for call in found if call.label == "gradients"]
    assert sizes == [[2, 2], [12, 12], [6, 6], [24, 24]]  # from the last bias to the first weight
    assert found[-1].label == "status"


def test_late_sums_begin_behind_the_agreement():
    run = experiment(SMALL, sync=Pipelined(width=2))
    assert calls(run, 0) == [STATUS, ("all_reduce", "gradients", 1)]


def test_a_rank_without_a_part_takes_none_in_its_sums():
    plan = Plan.data_parallel(graphs.mlp(4, 6, 2), 4)
    plan = plan.with_layer("fc0", scheme="shard_out", group_size=2, shares=(1, 0))
    summed = [
        [size for op, label, size in calls(experiment(plan), rank) if label == "gradients"]
        for rank in range(4)
    ]
    assert summed == [[1, 2], [1], [1, 2], [1]]


def mixed():
    """Four layers over pairs, cut in such ways that members fill their buckets at other times."""
    plan = Plan.data_parallel(graphs.mlp(4, 4, 4, 4, 4), 4)
    cuts = ("shard_in", None), ("shard_out", (3, 1)), ("shard_in", (0, 1)), ("shard_in", None)
    for index, (scheme, shares) in enumerate(cuts):
        plan = plan.with_layer(f"fc{index}", scheme=scheme, group_size=2, shares=shares)
    return program_of(experiment(plan, sync=wb.Synchronous(bucket_bytes=1)))


@pytest.mark.parametrize("rank", range(4))
def test_a_rank_sums_each_of_its_buckets_once_and_in_their_order(rank):
    program = mixed()
    one = program.of(rank)
    sizes = [4 * call.numel[rank] for call in one.calls() if call.label == "gradients"]
    assert sizes == [bucket.bytes for bucket in one.buckets]
    parts = map(one.part_of, (i for i in program.instructions if isinstance(i, Reduce)))
    found = [bucket for bucket, after in filter(None, parts)]
    assert sorted(found, key=str) == sorted(one.buckets, key=str)


@pytest.mark.parametrize(
    ("fields", "op"),
    [
        (dict(shard_optimizer=True), "all_gather"),
        (dict(sync=ParameterServer()), "broadcast"),
        (dict(sync=wb.LocalSGD(every=2)), "all_reduce"),
    ],
)
def test_a_rank_hands_out_its_buckets_in_their_order(fields, op):
    plan = Plan.data_parallel(graphs.mlp(4, 6, 2), 4)
    plan = plan.with_layer("fc1", scheme="shard_in", group_size=2)
    found = [call for call in calls(experiment(plan, **fields), 1) if call[1] == "parameters"]
    # Backward comes to the layer over pairs first; averages are taken in the order of sizes.
    sizes = [1, 2] if op == "all_reduce" else [1, 2][::-1]
    assert found == [(op, "parameters", k) for k in sizes]


def test_rows_are_gathered_ahead_where_ranks_share_no_memory():
    plan = SMALL.with_layer("fc1", scheme="shard_out").with_rounds("B")
    run = experiment(plan, batch_size=8)
    gather, back = ("all_gather", "fc1", 2), ("reduce_scatter", "fc1", 2)
    loss = [("all_gather", "labels", 2), gather, ("all_reduce", "fc1", 2)]
    end = [("all_reduce", "gradients", 1), STATUS]
    for hosts in (None, 2):
        assert calls(run, 0, hosts) == [gather, *loss, back, gather, *loss, back, *end]
    for rank in (0, 1):
        assert calls(run, rank, 1) == [gather, gather, *loss, back, *loss, back, *end]


def test_rows_are_gathered_ahead_where_some_of_a_group_share_no_memory():
    plan = Plan.data_parallel(graphs.mlp(4, 6, 2), 4).with_layer(
        "fc1", scheme="shard_out", group_size=2
    )
    run = experiment(plan.with_rounds("B"), batch_size=8)
    begun = [[call[0] for call in calls(run, rank, 3)[:2]] for rank in range(4)]
    assert begun == [["all_gather"] * 2] * 4  # the labels', and across hosts the next round's rows
    seconds = [calls(run, rank, 3)[1][1] for rank in range(4)]
    assert seconds == ["labels", "labels", "fc1", "fc1"]


def test_first_steps_are_those_of_a_program_of_their_own():
    program = program_of(experiment(PAIRS, sync=Pipelined(width=2, warmup=3)))
    assert [program.at(step) is program.warm for step in (0, 2, 3, 9)] == [True, True, False, False]
    assert [program.at(step) is program for step in (2, 3)] == [False, True]
    assert words(program.warm)[-3:] == ["wait", "agree", "update"]
    assert program.of(2).warm.rank == 2
    assert program.of(2).warm.program is program.warm
    assert list(program.warm.of(2).calls())[-1].label == "status"


def test_a_rank_has_buckets_of_its_own():
    plan = Plan.data_parallel(graphs.mlp(4, 6, 2), 4)
    plan = plan.with_layer("fc0", scheme="shard_out", group_size=2, shares=(2, 1))
    program = program_of(experiment(plan, sync=wb.Pipelined(width=2), shard_optimizer=True))
    one = program.of(3)
    assert [bucket.sizes for bucket in one.buckets] == [(8, 48), (8, 32)]
    assert [bucket.sizes for bucket in one.handed] == [(8, 48), (8, 32)]
    assert [bucket.sizes for bucket in program.of(2).handed] == [(8, 48), (16, 64)]


@pytest.mark.parametrize("rank", [-1, 4])
def test_a_rank_that_is_not_there(rank):
    with pytest.raises(IndexError, match="there are 0 to 3"):
        wb.program(experiment(PAIRS)).of(rank)


def test_a_plan_alone_is_given_a_usual_step():
    batch = dict(batch_size=4 * 32, optimizer=wb.SGD(lr=0.01, momentum=0.9))
    assert wb.program(PAIRS) == wb.program(experiment(PAIRS, data="synthetic", **batch))
    assert wb.program(PAIRS, None, experiment(PAIRS)) == wb.program(experiment(PAIRS))
    with pytest.raises(PlanError, match="program needs a Plan or an Experiment, got 3"):
        wb.program(3)


def test_a_machine_says_who_shares_memory():
    far = wb.Machine.preset("cpu-1gbe").replace(ranks_per_host=2)
    assert wb.program(experiment(PAIRS), far).hosts != wb.program(experiment(PAIRS)).hosts
    with pytest.raises(MachineError, match="program needs a Machine"):
        wb.program(experiment(PAIRS), "cpu-1gbe")


def test_conversions_of_several_steps_read_each_other():
    graph = graphs.mlp(8, 8, 8)
    first, second = [layer.name for layer in graph.layers if layer.kind == "linear"][:2]
    plan = Plan.data_parallel(graph, 4).with_layer(first, scheme="shard_out", group_size=2)
    plan = plan.with_layer(second, scheme="shard_out", group_size=4)
    operations = program_of(experiment(plan)).operations
    chains = [value for value in operations.by_value if len(value[1]) > 1]
    assert chains
    for name, steps in chains:
        found = operations.by_value[name, steps]
        assert found.reads == ((name, steps[:-1]),)
        assert found.step == steps[-1]


@pytest.mark.parametrize("readers", [*permutations(("rows", "pair", "four"))], ids="-".join)
def test_whatever_is_read_was_made_before(readers):
    """Several layers read one value, some of them by the same conversion and another one."""
    net = graphs.Builder((8,)).linear("a", 8)
    for name in readers:
        net.linear(name, 8, "a")
    net.same("two", "add", readers[0], readers[1]).same("all", "add", "two", readers[2])
    plan = Plan.data_parallel(net.graph(), 4)
    for name, k in {"a": 2, "pair": 2, "four": 4}.items():
        plan = plan.with_layer(name, scheme="shard_out", group_size=k)
    made = {("input", ())}
    for operation in program_of(experiment(plan)).operations:
        assert made.issuperset(operation.reads)
        made.add(operation.gives)
