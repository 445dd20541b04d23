"""Every reader of files: what it is called on, and which errors say that a file is refused."""

import json
import shutil
import sqlite3
import zlib
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import workbench as wb
from tests.hostile.samples import NET
from workbench.client.calibration import cache
from workbench.client.records.environment import Environment
from workbench.client.records.report import report
from workbench.client.sweep import results
from workbench.hosts.remote.reception import Hello
from workbench.model import CheckpointError, WeightsFile
from workbench.model.weights.exchange import read_weights
from workbench.plan.extension.sealed import SealError
from workbench.plan.extension.user_object import OwnObjectError, opened
from workbench.plan.graph.graph import Input
from workbench.plan.io.errors import ExperimentError, MachineError, PlanError
from workbench.store import messages, registry
from workbench.store.cluster_spec import ClusterSpec
from workbench.store.cluster_store import rebuild
from workbench.store.errors import ClusterError
from workbench.store.process import holder
from workbench.store.rank_files import RankFiles
from workbench.store.run_folder import is_whole, newest_whole
from workbench.store.store import Store
from workbench.train.checkpoint.checkpoint import latest, load, state_dict
from workbench.train.data.datasets import open_data
from workbench.train.data.reading import DataError
from workbench.train.run.cells import CellFiles
from workbench.train.run.requests import RunRequests

TEXT = (PlanError, ExperimentError, MachineError)
GRAPH = wb.trace(NET, input_shape=(1, 8, 8))
TEXT = (PlanError, ExperimentError, MachineError)


@dataclass(frozen=True)
class Reader:
    """A reader of files.

    Attributes:
        kind: the folder of samples that it reads.
        files: which of these are changed.
        read: reads a copy of the folder, some of it changed; of the file that was.
        refuses: the errors by which it says that something is wrong.
        writes: whether it also writes, beside what it reads.
    """

    kind: str
    files: str
    read: Callable[[Path, Path], object]
    refuses: tuple[type[Exception], ...]
    writes: bool = False


def shown(value: object) -> None:
    """Shows a value in every way; nothing of what a file says may become markup."""
    assert repr(value) + str(value)
    html = value._repr_html_() if hasattr(value, "_repr_html_") else ""
    assert "<xss" not in html


@contextmanager
def about(file: Path) -> Iterator[None]:
    """Holds that errors name the file."""
    try:
        yield
    except TEXT as wrong:
        if not str(wrong).startswith(f"{file}: "):
            raise AssertionError(f"without its file: {wrong}") from wrong
        raise


def text(kind: type) -> Callable[[Path, Path], object]:
    def read(_: Path, file: Path) -> None:
        with about(file):
            value = kind.load(file)
        shown(value)
        assert kind.from_toml(value.to_toml()) == value
        if isinstance(value, wb.Plan):
            shown(value.graph)
            assert "<xss" not in value.svg()
        if isinstance(value, wb.Experiment):
            value.replace(seed=value.seed + 1)
            with suppress(OwnObjectError):
                opened(value)  # as ranks do; what it names is refused there

    return read


def run(folder: Path, file: Path) -> None:
    if file.name == "metrics.csv":  # which is read where nothing else tells
        shutil.rmtree(folder / "attempts")
    found = wb.Run.load(folder)
    shown(found)
    shown(found.experiment)
    assert "<xss" not in report(found)
    assert len(found.metrics) + len(found.evaluations) >= 0
    shown(found.environment)


def runs(folder: Path, _: Path) -> None:
    frame = wb.runs(folder)
    assert frame.to_html()


def weights_of_run(folder: Path, _: Path) -> None:
    found = wb.Run.load(folder)
    assert found.state_dict()
    assert found.timeline()


def requests(folder: Path, _: Path) -> None:
    found = RunRequests(folder)
    experiment = wb.Experiment.load(folder / "experiment.toml", GRAPH)
    shown(found.in_force(experiment))
    assert [*found.rates(), *found.saved(), found.newest(), found.replanned_at()]


def checkpoint(folder: Path, _: Path) -> None:
    assert state_dict(folder, GRAPH)
    shown(load(folder, GRAPH).experiment())


def whole(folder: Path, _: Path) -> None:
    newest_whole(folder)
    latest(folder)
    for path in folder.rglob("*.safetensors"):
        is_whole(path)


def spec(folder: Path, _: Path) -> None:
    assert repr(ClusterSpec.load(folder))
    holder(folder / "supervisor")


def store(folder: Path, _: Path) -> None:
    with closing(Store(folder / "server.sqlite", read_only=True)) as found:
        for job in found.jobs():
            assert repr(found.job(job.id))
        shown((found.events(), found.engines(), found.commands()))
        shown(results(found, ""))


def rebuilt(folder: Path, _: Path) -> None:
    folder.rename(folder.parent / "a-run")
    cluster = registry.folder_for(folder.parent, "sample")
    cluster.mkdir(mode=0o700)
    rebuild(cluster)


def message(folder: Path, file: Path) -> None:
    content, key = file.read_bytes(), (folder / "key").read_bytes()
    if file.name in ("experiment", "unsealed"):
        shown(messages.unpack(content))
        shown(messages.unpack(content, key))
    elif file.name == "keywords":
        assert messages.unpack_keywords(content, key) is not None
    else:
        assert messages.Answer.unpack(content)
        assert messages.Answer.unpack(content, key)


def known(folder: Path, _: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(folder))
        shown([*registry.known()])
        registry.find("sample")


def hello(_: Path, file: Path) -> None:
    shown(Hello.read(json.loads(file.read_text())))


def pictures(folder: Path, _: Path) -> None:
    data = wb.ImageFolder(root=str(folder))
    for split in ("train", "test"):
        opened_data = open_data(data, (Input((3, 8, 8)),), 2, split)
        opened_data.batch(torch.arange(len(opened_data)))


def cells(folder: Path, _: Path) -> None:
    files = CellFiles(folder)
    assert [files.asked(1), files.ending(1, 0), files.printed(1, 0)]


def calibrated(folder: Path, file: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cache, "place", lambda name: file)
        cache.kept("machine")


OWN = (ClusterError, TypeError, ValueError, sqlite3.Error, zlib.error)  # nobody else writes it
RUN = (*TEXT, ClusterError, CheckpointError)

READERS = {
    "plan": Reader("plan", "*.toml", text(wb.Plan), TEXT),
    "experiment": Reader("experiment", "*.toml", text(wb.Experiment), TEXT),
    "machine": Reader("machine", "*.toml", text(wb.Machine), TEXT),
    "machine of a host": Reader("machine", "*.toml", calibrated, TEXT),
    "run": Reader("run", "*.*", run, RUN),
    "metrics": Reader("run", "[amen]*/**/*.*", run, RUN),
    "weights of a run": Reader("run", "step-*/*", weights_of_run, RUN),
    "runs": Reader("run", "*.*", runs, ()),
    "requests": Reader("run", "requests/*", requests, (*TEXT, ValueError)),
    "environment": Reader("run", "environment.json", lambda f, _: shown(Environment.load(f)), RUN),
    "ranks": Reader("run", "attempts/**/*.*", lambda f, p: RankFiles(p.parent, 0).pid, ()),
    "checkpoint": Reader("checkpoint", "*", checkpoint, RUN),
    "checkpoint, whole": Reader("run", "step-*/*", whole, ()),
    "initial weights": Reader(
        "run",
        "initial.safetensors",
        lambda f, p: [each.read(n) for each in (WeightsFile(p),) for n in each.names],
        (CheckpointError,),
    ),
    "safetensors": Reader("safetensors", "*", lambda f, p: read_weights(p), (CheckpointError,)),
    "several safetensors": Reader("split", "*", lambda f, p: read_weights(f), (CheckpointError,)),
    "torch's metadata": Reader(
        "dcp", ".metadata", lambda f, p: read_weights(f), (CheckpointError,)
    ),
    "torch's chunks": Reader("dcp", "*.distcp", lambda f, p: read_weights(f), (CheckpointError,)),
    "cluster": Reader("cluster", "cluster.json", spec, (ClusterError,)),
    "store": Reader("cluster", "server.sqlite", store, OWN),
    "runs of a lost store": Reader("run", "*.*", rebuilt, (), writes=True),
    "notes of clusters": Reader("registry", "**/*.cluster", known, (ClusterError,)),
    "messages": Reader("message", "[!k]*", message, (*RUN, SealError, ValueError, zlib.error)),
    "cells": Reader("cells", "*", cells, (ValueError,)),
    "pictures": Reader("pictures", "t*/*/*", pictures, (DataError,)),
    "an agent's host": Reader("hello", "*", hello, (KeyError, TypeError, ValueError)),
}
