"""Experiments on their way to engines."""

import os
from dataclasses import replace

import pytest

from tests.plan.graphs import mlp, vgg
from workbench.plan import SGD, Experiment, Plan, Synthetic
from workbench.plan.extension.sealed import KEY_BYTES, SealError
from workbench.plan.extension.user_object import OwnObjectError
from workbench.store import messages
from workbench.store.errors import ClusterError

KEY = bytes(range(KEY_BYTES))


PLAN = Plan.data_parallel(mlp(4, 4), 2)


def experiment(plan: Plan, **fields: object) -> Experiment:
    data = Synthetic(classes=plan.graph.num_classes)
    return Experiment(plan=plan, optimizer=SGD(lr=0.1), steps=3, data=data, **fields)


def test_an_experiment_arrives_as_it_was():
    sent = experiment(Plan.hybrid(vgg(), 4, 2))
    assert messages.unpack(messages.pack(sent)) == sent


def test_the_user_s_own_module_comes_along():
    graph = mlp(4, 4)
    graph = replace(graph, source=replace(graph.source, skeleton=b"code\x00and shapes"))
    sent = messages.pack(experiment(Plan.data_parallel(graph, 2)), KEY)
    assert messages.unpack(sent).plan.graph.source.skeleton is None  # it is code
    with pytest.raises(SealError):
        messages.unpack(sent, KEY[::-1])
    arrived = messages.unpack(sent, KEY)
    assert arrived.plan.graph.source.skeleton == b"code\x00and shapes"


def test_so_does_its_way_in_evaluation():
    graph = mlp(4, 4)
    apart = replace(graph, source=replace(graph.source, skeleton=b"in evaluation"))
    here = replace(graph.source, skeleton=b"in training")
    graph = replace(graph, source=here, evaluation=apart)
    arrived = messages.unpack(
        messages.pack(experiment(Plan.data_parallel(graph, 2)), KEY), KEY
    ).plan.graph
    assert arrived.source.skeleton == b"in training"
    assert arrived.evaluation.source.skeleton == b"in evaluation"


def test_what_it_names_is_imported_by_who_can_check_its_seal_alone():
    sent = messages.pack(experiment(PLAN, loss="math:sqrt"), KEY)
    assert messages.unpack(sent, KEY).loss.function.is_at_hand
    assert not messages.unpack(sent).loss.function.is_at_hand
    unsealed = messages.pack(experiment(PLAN, loss="math:sqrt"))
    assert not messages.unpack(unsealed, KEY).loss.function.is_at_hand


def test_a_text_that_was_changed_on_its_way_is_refused():
    sent = messages.pack(experiment(PLAN), KEY)
    for place in (1, 40, len(sent) - 1):
        changed = bytearray(sent)
        changed[place] ^= 1
        with pytest.raises(SealError):
            messages.unpack(bytes(changed), KEY)


def test_what_nobody_vouches_for_is_not_sealed():
    read = Experiment.from_toml(experiment(PLAN, loss="math:sqrt").to_toml())
    with pytest.raises(OwnObjectError, match=r"named in a text, as loss\.function"):
        messages.pack(read, KEY)
    assert messages.unpack(messages.pack(read), KEY) == read


def test_a_message_is_small():
    assert len(messages.pack(experiment(Plan.hybrid(vgg(), 4)))) < 4096


@pytest.fixture
def large() -> Experiment:
    graph = mlp(4, 4)
    code = os.urandom(messages.LARGEST_INLINE_BYTES)
    graph = replace(graph, source=replace(graph.source, skeleton=code))
    return experiment(Plan.data_parallel(graph, 2))


def test_a_large_one_travels_as_a_file(large, tmp_path):
    folder = tmp_path / "experiments"
    sent = messages.sendable(messages.pack(large, KEY), folder)
    assert len(sent) < 1000
    assert messages.unpack(sent, KEY) == large
    assert messages.unpack(sent, KEY).plan.graph.source.skeleton == large.plan.graph.source.skeleton
    assert messages.unpack(sent) == large
    with pytest.raises(SealError):
        messages.unpack(sent, KEY[::-1])
    assert messages.sendable(messages.pack(large, KEY), folder) == sent
    (file,) = folder.iterdir()
    assert str(file).encode() in sent
    assert (folder.stat().st_mode & 0o777, file.stat().st_mode & 0o022) == (0o700, 0)


def test_a_small_one_makes_no_file(tmp_path):
    packed = messages.pack(experiment(Plan.hybrid(vgg(), 4)))
    largest = packed.ljust(messages.LARGEST_INLINE_BYTES, b"\0")
    for each in (packed, largest):
        assert messages.sendable(each, tmp_path / "experiments") == each
    assert not any(tmp_path.iterdir())


def test_a_file_that_is_another_one_is_refused(large, tmp_path):
    packed = messages.pack(large, KEY)
    sent = messages.sendable(packed, tmp_path)
    (file,) = tmp_path.iterdir()
    for other in (packed[:-1], packed + b"\0", bytes([packed[0] ^ 1]) + packed[1:], b""):
        file.write_bytes(other)
        with pytest.raises(ClusterError, match=f"{file.name} is damaged.*submit it again"):
            messages.unpack(sent, KEY)
    file.unlink()
    with pytest.raises(ClusterError, match=f"{file.name} cannot be read: No such file"):
        messages.unpack(sent, KEY)
    assert messages.sendable(packed, tmp_path) == sent  # once more
    assert messages.unpack(sent, KEY) == large


def test_the_folder_of_a_cluster_that_is_gone_stays_gone(large, tmp_path):
    with pytest.raises(FileNotFoundError):
        messages.sendable(messages.pack(large, KEY), tmp_path / "cluster" / "experiments")
    assert not any(tmp_path.iterdir())
