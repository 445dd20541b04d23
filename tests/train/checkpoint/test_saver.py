"""Checkpoints that are written while training goes on."""

import os
import threading
from types import SimpleNamespace

import pytest
import torch

from tests.train.checkpoint import saving
from workbench.model.errors import CheckpointError
from workbench.model.weights.pieces import Snapshot
from workbench.model.weights.slices import PieceSet
from workbench.plan.placement.flow import WeightPlacement
from workbench.plan.placement.placement import Replicate, Shard
from workbench.store.messages import StopRequest
from workbench.train.checkpoint import saver as saver_module
from workbench.train.checkpoint.checkpoint import latest
from workbench.train.checkpoint.saver import Holding, Saver, _Writing, holdings, parts
from workbench.train.run.loop import Loop
from workbench.train.run.requests import LearningRates, RunRequests, SaveNow


def test_the_pieces_of_a_tensor_and_who_holds_them():
    """Nobody writes an empty piece."""
    whole = WeightPlacement(Replicate(), 2, (6,), "float32", True)
    assert holdings("bias", whole, 4) == [Holding("bias", None, 0, 6, (0, 1, 2, 3))]
    shard = Shard(0, (1, 0, 2))
    cut = WeightPlacement(shard, 3, (3, 5), "float32", True)
    assert holdings("weight", cut, 6) == [
        Holding("weight", shard, 0, 5, (0, 3)),
        Holding("weight", shard, 2, 10, (2, 5)),
    ]


@pytest.fixture
def gate(monkeypatch):
    """Files are written once it is open."""
    gate, write = threading.Event(), Snapshot.write

    def when_open(self, path, is_wanted):
        while is_wanted() and not gate.wait(0.01):
            pass
        write(self, path, is_wanted)

    monkeypatch.setattr(Snapshot, "write", when_open)
    yield gate
    gate.set()


def begun(part, saver, *others):
    """Begins a checkpoint whose parts are also those of other ranks."""
    own, files = parts(part.done, part.model, part.updater)
    saver.begin(part.done, own, (*files, *others), saving.experiment(part.plan, part.value))


def test_steps_go_on_meanwhile_and_change_nothing_of_it(tmp_path, gate):
    part = saving.alone(until=2)
    saver = Saver(tmp_path, part.everyone)
    expected = part.tensors()
    part.begin(saver)
    part.train(5)
    assert latest(tmp_path) is None
    gate.set()
    saver.finish()
    assert latest(tmp_path) == saver.newest == tmp_path / "step-000002"
    reader = PieceSet(saver.newest)
    for name, tensor in expected.items():
        assert torch.equal(reader.read(name), tensor), name


def test_the_next_one_waits_and_takes_the_same_memory(tmp_path, gate):
    part = saving.alone(until=1)
    saver = Saver(tmp_path, part.everyone)
    gate.set()
    part.begin(saver)
    memory = saver._snapshot._memory
    part.train(2)
    part.begin(saver)
    assert saver.newest == tmp_path / "step-000001"
    saver.finish()
    assert saver._snapshot._memory is memory
    assert saver._snapshot.num_bytes == sum(t.nbytes for t in part.tensors().values())


def test_what_is_given_up_half_way_leaves_the_last_one(tmp_path, gate):
    part = saving.alone(until=1)
    gate.set()
    old = part.save(tmp_path)
    gate.clear()
    saver = Saver(tmp_path, part.everyone, keep=1)
    part.train(2)
    part.begin(saver)
    writing = saver._writing
    saver.close()
    writing._thread.join()
    assert latest(tmp_path) == old
    assert not list(tmp_path.glob("**/*.safetensors.*part"))


def test_who_gives_up_does_not_wait_for_the_disk(tmp_path, monkeypatch):
    is_slow, fsync = threading.Event(), os.fsync

    def slow(descriptor):
        assert is_slow.wait(60.0)
        fsync(descriptor)

    part = saving.alone(until=1)
    saver = Saver(tmp_path, part.everyone)
    monkeypatch.setattr(os, "fsync", slow)
    part.begin(saver)
    writing = saver._writing
    saver.close()
    assert writing._thread.is_alive()
    is_slow.set()
    writing._thread.join()
    assert latest(tmp_path) is None
    assert not list(tmp_path.glob("**/*.safetensors*"))


def test_it_has_its_name_once_every_rank_s_part_is_there(tmp_path):
    part = saving.alone(until=1)
    saver = Saver(tmp_path, part.everyone)
    other = "rank-00001.safetensors"
    begun(part, saver, other)
    saver._writing.wait_for_part()
    assert latest(tmp_path) is None
    theirs = Snapshot()
    theirs.take({})
    theirs.write(tmp_path / "step-000001.tmp" / other)
    saver.finish()
    assert latest(tmp_path) == tmp_path / "step-000001"

    part.train(2)
    begun(part, saver, other)
    saver._writing.wait_for_part()
    saver.close()  # the other rank is gone
    assert latest(tmp_path) == tmp_path / "step-000001"


def test_ranks_meet_while_they_wait_for_a_slow_disk(tmp_path, gate, monkeypatch):
    """However long it takes: who met the others is not lost, and who says so is not hung."""
    monkeypatch.setattr(saver_module, "MEET_EVERY_S", 0.001)
    part, renewed = saving.alone(until=1), []

    def renew():
        renewed.append(len(renewed))
        if len(renewed) == 3:
            gate.set()

    saver = Saver(tmp_path, part.everyone, renew=renew)
    part.begin(saver)
    saver.finish()
    assert len(renewed) >= 3
    assert latest(tmp_path) == tmp_path / "step-000001"


def test_what_went_wrong_is_told_where_ranks_meet_next(tmp_path, monkeypatch):
    part = saving.alone(until=1)
    old, saver = part.save(tmp_path), Saver(tmp_path, part.everyone)
    part.train(2)

    def full(self, path, is_wanted):
        raise CheckpointError("the disk is full")

    monkeypatch.setattr(Snapshot, "write", full)
    part.begin(saver)
    with pytest.raises(CheckpointError, match=f"at step 2: rank 0: the disk is full; .* {old}"):
        part.begin(saver)
    assert latest(tmp_path) == old
    assert not list(tmp_path.glob("*.tmp"))


def test_a_requested_checkpoint_is_whole_when_it_is_noted_as_done(tmp_path, gate, monkeypatch):
    wait, carry_out, there = _Writing.wait_for_part, RunRequests.carry_out, []

    def opening(writing):
        gate.set()  # nothing is written before somebody waits for it
        wait(writing)

    def noted(requests, number, found):
        there.append((number, found.step, latest(tmp_path)))
        carry_out(requests, number, found)

    monkeypatch.setattr(_Writing, "wait_for_part", opening)
    monkeypatch.setattr(RunRequests, "carry_out", noted)
    part = saving.alone(until=3)
    state = SimpleNamespace(
        everyone=part.everyone,
        experiment=saving.experiment(part.plan, part.value),
        world=SimpleNamespace(rank=0),
        tracer=None,
        model=part.model,
        updater=part.updater,
        strategy=SimpleNamespace(settle=lambda: None, is_settled=True, in_flight=[], residuals=[]),
    )
    loop = Loop(state, LearningRates(0.1), None, tmp_path, StopRequest(), None)
    number = RunRequests(tmp_path).submit(SaveNow())
    loop._hear(number, part.done)
    assert there == [(number, 3, tmp_path / "step-000003")]
