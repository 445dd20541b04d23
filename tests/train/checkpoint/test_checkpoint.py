import itertools
import shutil

import pytest
import torch
from safetensors import safe_open
from torch import nn
from torch.testing import assert_close

from tests.train.checkpoint import saving
from workbench.model.tracing.trace import trace
from workbench.model.weights.slices import PieceSet
from workbench.plan.experiment.experiment import Adam, AdamW, Experiment
from workbench.plan.placement.placement import Shard
from workbench.plan.plans.plan import Plan
from workbench.train.checkpoint import saver
from workbench.train.checkpoint.checkpoint import CheckpointError, latest, load
from workbench.train.checkpoint.saver import Holding, assign

GRAPH = saving.graph()
ONE = Plan.data_parallel(GRAPH, world_size=1)
PLANS = {
    "one": ONE,
    "data-parallel-3": Plan.data_parallel(GRAPH, world_size=3),
    "hybrid-4": Plan.hybrid(GRAPH, world_size=4, group_size=4),
    "hybrid-2x2": Plan.hybrid(GRAPH, world_size=4, group_size=2),
    "unequal": Plan.data_parallel(GRAPH, world_size=2)
    .with_layer("0", scheme="shard_out", group_size=2, shares=(3, 1))
    .with_layer("4", scheme="shard_out", group_size=2, shares=(0, 1))
    .with_layer("6", scheme="shard_in", group_size=2, shares=(5, 2)),
}
MOMENTUM = saving.MOMENTUM
OPTIMIZERS = [
    pytest.param(MOMENTUM, id="momentum"),
    pytest.param(Adam(lr=0.01), id="adam"),
    pytest.param(AdamW(lr=0.01), id="adamw"),
]


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name in expected:
        assert torch.equal(found[name], expected[name]), name


def whole(path):
    reader = PieceSet(path)
    return {name: reader.read(name) for name in reader.names}


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("value", [OPTIMIZERS[0], OPTIMIZERS[2]])
def test_any_plan_saves_the_same_logical_tensors(on_ranks, tmp_path, name, value):
    plan = PLANS[name]
    expected = saving.alone(value, until=2).tensors()
    on_ranks(plan.world_size, saving.train_and_save, plan, value, 2, tmp_path)
    found = whole(latest(tmp_path))
    assert found.keys() == expected.keys()
    for tensor in expected:
        assert_close(found[tensor], expected[tensor], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", PLANS)
def test_any_plan_loads_what_another_saved(on_ranks, tmp_path, name):
    """Each rank's pieces are exactly the slices of what was saved, state included."""
    source, target = PLANS["unequal"], PLANS[name]
    on_ranks(2, saving.train_and_save, source, Adam(), 2, tmp_path)
    saved = whole(latest(tmp_path))
    ranks = on_ranks(
        target.world_size, saving.resume_and_train, target, Adam(), latest(tmp_path), 2
    )
    for rank, found in enumerate(ranks):
        for tensor, piece in found.items():
            expected = saved[tensor]
            placed = target.flow.weights[tensor.rpartition("/")[2]]
            if isinstance(placed.placement, Shard) and expected.ndim:
                index = rank % placed.group_size
                expected = saving.piece_under(placed.placement, expected, index)
            assert torch.equal(piece, expected), (rank, tensor)


@pytest.mark.parametrize("value", OPTIMIZERS)
def test_a_resumed_run_goes_on_bitwise(tmp_path, value):
    saving.alone(value, until=3).save(tmp_path)
    assert_same(
        saving.alone(value, 6, latest(tmp_path)).tensors(), saving.alone(value, 6).tensors()
    )


def test_ranks_resume_bitwise(on_ranks, tmp_path):
    plan, value = PLANS["hybrid-2x2"], AdamW(lr=0.01)
    on_ranks(4, saving.train_and_save, plan, value, 3, tmp_path)
    path = latest(tmp_path)
    resumed = on_ranks(4, saving.resume_and_train, plan, value, path, 6)
    straight = on_ranks(4, saving.train_and_save, plan, value, 6, tmp_path / "straight")
    for found, expected in zip(resumed, straight, strict=True):
        assert_same(found, expected)


def test_pieces_are_written_once_and_spread_over_ranks(on_ranks, tmp_path):
    plan = PLANS["data-parallel-3"]
    on_ranks(3, saving.train_and_save, plan, MOMENTUM, 1, tmp_path)
    held = {}
    for file in sorted(latest(tmp_path).glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            held[file.name] = {name: tensors.get_tensor(name).numel() for name in tensors.keys()}
    names = list(itertools.chain.from_iterable(held.values()))
    assert sorted(names) == sorted(saving.alone(until=1).tensors())
    written = [sum(sizes.values()) for sizes in held.values()]
    largest = max(itertools.chain.from_iterable(sizes.values() for sizes in held.values()))
    assert len(written) == 3
    assert max(written) <= max(largest, 1.1 * sum(written) / 3)


def test_the_largest_piece_goes_first_to_the_idlest_holder():
    def piece(name, elements, holders):
        return Holding(name, None, 0, elements, holders)

    pieces = [
        piece("a", 3, (0, 1, 2)),
        piece("b", 4, (0, 1)),
        piece("c", 4, (0,)),
        piece("d", 1, (0, 1, 2)),
    ]
    names = [[held.name for held in mine] for mine in assign(pieces, 3)]
    assert names == [["c"], ["b"], ["a", "d"]]
    swapped = [[held.name for held in mine] for mine in assign(reversed(pieces), 3)]
    assert swapped == names


def test_a_checkpoint_says_what_was_run(tmp_path):
    path = saving.alone(until=7).save(tmp_path)
    saved = load(path, GRAPH)
    assert path == tmp_path / "step-000007"
    assert saved.step == 7
    assert saved.experiment() == Experiment.load(path / "experiment.toml")
    assert saved.experiment().optimizer == MOMENTUM
    assert 'model = "Sequential"' in (path / "checkpoint.toml").read_text()


def steps(directory):
    return sorted(path.name for path in directory.iterdir())


def test_latest_ignores_what_is_not_complete(tmp_path):
    assert latest(tmp_path / "nothing") is None
    assert latest(tmp_path) is None
    path = saving.alone(until=2).save(tmp_path)
    shutil.copytree(path, tmp_path / "step-000004.tmp")
    (tmp_path / "step-000005").mkdir()
    (tmp_path / "notes.txt").touch()
    assert latest(tmp_path) == path


def test_a_kill_before_the_last_moment_leaves_the_old_checkpoint(tmp_path, monkeypatch):
    class Killed(BaseException):
        pass

    def killed(*_):
        raise Killed

    part = saving.alone(until=2)
    old = part.save(tmp_path, keep=1)
    part.train(4)
    monkeypatch.setattr(saver, "publish", killed)
    with pytest.raises(Killed):
        part.save(tmp_path, keep=1)
    assert latest(tmp_path) == old
    load(old, GRAPH)


def test_a_full_disk_is_told_to_every_rank_and_costs_nothing(on_ranks, tmp_path):
    plan = PLANS["hybrid-4"]
    told = on_ranks(4, saving.save_with_a_full_disk, plan, MOMENTUM, tmp_path, 2)
    expected = (
        "no checkpoint at step 1: rank 2: rank-00002.safetensors could not be written "
        f"(the disk is full); the last checkpoint is {tmp_path}/step-000000"
    )
    assert told == [expected] * 4
    assert steps(tmp_path) == ["step-000000"]
    load(tmp_path / "step-000000", GRAPH)


def test_a_first_save_where_nothing_can_be_written(tmp_path):
    (tmp_path / "run").write_text("a file where the folder should be")
    with pytest.raises(CheckpointError, match=r"no checkpoint at step 0: .*run.*no earlier"):
        saving.alone().save(tmp_path / "run")


def test_a_checkpoint_of_another_model_says_what_differs(tmp_path):
    path = saving.alone(until=1).save(tmp_path)
    first = trace(saving.net()[:4], input_shape=(3, 4, 4))
    with pytest.raises(
        CheckpointError, match=r"another model.*; it also has 4\.bias, 4\.weight, 6"
    ):
        load(path, first)
    net = saving.net()
    net[5] = nn.Tanh()
    with pytest.raises(CheckpointError, match=r"another model.*; weights agree, operations do not"):
        load(path, trace(net, input_shape=(3, 4, 4)))
