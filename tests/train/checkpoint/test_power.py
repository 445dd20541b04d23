"""Power fails at any moment of a run: there is always a checkpoint, and it is whole."""

import torch

from tests.power import Power
from tests.train.checkpoint import saving
from workbench.train.checkpoint import checkpoint as folder
from workbench.train.checkpoint.checkpoint import latest, load

GRAPH = saving.graph()


def saved(tmp_path, monkeypatch, *, until=(2, 4, 6)):
    """The states that a disk may have while checkpoints are written, and what each must hold."""
    run, copies = tmp_path / "run", tmp_path / "copies"
    copies.mkdir()
    part, power, found = saving.alone(), Power(run, copies), []
    run.mkdir()
    with power.watched(monkeypatch):
        part.save(run, keep=1)
    expected = {0: {name: tensor.clone() for name, tensor in part.tensors().items()}}
    for before, step in zip((0, *until), until, strict=False):
        part.train(step)
        expected[step] = {name: tensor.clone() for name, tensor in part.tensors().items()}
        first = len(power.states)
        with power.watched(monkeypatch):
            part.save(run, keep=1)
        found += [(state, (before, step)) for state in power.states[first:-1]]
        found.append((power.states[-1], (step,)))
    return found, expected


def losses(found, expected):
    """The states in which a checkpoint is missing, or not what it was."""
    bad = []
    for state, steps in found:
        path = latest(state)
        try:
            checkpoint = load(path, GRAPH)
            assert checkpoint.step in steps, (checkpoint.step, steps)
            for name, tensor in expected[checkpoint.step].items():
                assert torch.equal(checkpoint.reader.read(name), tensor), name
        except Exception as error:
            bad.append((state.name, steps, repr(error)))
    return bad


def test_there_is_always_a_whole_checkpoint(tmp_path, monkeypatch):
    found, expected = saved(tmp_path, monkeypatch)
    assert len(found) > 60
    assert losses(found, expected) == []


def test_what_is_pruned_before_the_next_is_on_the_disk_would_be_missed(tmp_path, monkeypatch):
    """The test above sees it, so it tests something."""
    monkeypatch.setattr(folder, "_sync", lambda directory: None)
    found, expected = saved(tmp_path, monkeypatch)
    assert losses(found, expected)
