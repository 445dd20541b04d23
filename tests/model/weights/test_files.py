"""A file is there whole, or as it was before."""

import os
import resource
import signal
import threading

import pytest
import torch
from safetensors.torch import load_file

from workbench.model import CheckpointError
from workbench.model.weights.files import TensorFile, replacing, write_tensors


def test_safetensors_reads_what_is_written(tmp_path):
    path = tmp_path / "deep" / "x.safetensors"
    tensors = {"a": torch.arange(6.0).reshape(2, 3), "n": torch.tensor(3), "e": torch.zeros(0, 2)}
    write_tensors(path, tensors, {"note": "text"})
    loaded = load_file(path)
    assert loaded.keys() == tensors.keys()
    assert all(torch.equal(loaded[name], tensors[name]) for name in tensors)
    assert TensorFile(path).metadata == {"note": "text"}


def test_views_are_written_as_what_they_show(tmp_path):
    whole = torch.arange(12.0).reshape(3, 4)
    write_tensors(tmp_path / "x", {"t": whole.t(), "row": whole[1], "column": whole[:, 1]})
    loaded = load_file(tmp_path / "x")
    assert torch.equal(loaded["t"], whole.t())
    assert torch.equal(loaded["column"], whole[:, 1])


def test_the_same_tensors_give_the_same_bytes(tmp_path):
    tensors = {name: torch.full((3,), float(len(name))) for name in ("b", "aa", "ccc")}
    write_tensors(tmp_path / "x", tensors)
    write_tensors(tmp_path / "y", dict(reversed(tensors.items())))
    assert (tmp_path / "x").read_bytes() == (tmp_path / "y").read_bytes()


def test_a_failure_leaves_what_was_there(tmp_path):
    path = tmp_path / "x"
    path.write_text("before")
    with pytest.raises(RuntimeError, match="half way"):
        write_half(path)
    assert path.read_text() == "before"
    assert os.listdir(tmp_path) == ["x"]


def write_half(path):
    with replacing(path) as part:
        part.write_text("half")
        raise RuntimeError("half way")


def test_a_full_disk(tmp_path):
    """A limit on the size of files stands in for it: the error comes while writing, too."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
        with pytest.raises(CheckpointError, match=r"x could not be written: .*too large"):
            write_tensors(tmp_path / "x", {"a": torch.zeros(1_000_000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    assert os.listdir(tmp_path) == []


def test_a_full_disk_is_called_so(tmp_path, monkeypatch):
    def full(descriptor):
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CheckpointError, match=r"x could not be written \(the disk is full\)"):
        write_tensors(tmp_path / "x", {"a": torch.zeros(3)})
    assert os.listdir(tmp_path) == []


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="could not be written"):
        write_tensors(tmp_path / "file" / "x", {"a": torch.zeros(3)})


def test_writers_at_once(tmp_path):
    """Each writes a file of its own, so that whoever reads sees one of them, whole."""
    path = tmp_path / "x"
    together = threading.Barrier(4)

    def write(value):
        together.wait()
        for _ in range(10):
            write_tensors(path, {"a": torch.full((1000,), float(value))})
            assert TensorFile(path).view("a", (slice(0, 1000),)).unique().numel() == 1

    failed = []

    def guarded(value):
        try:
            write(value)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=guarded, args=(value,)) for value in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    assert os.listdir(tmp_path) == ["x"]
