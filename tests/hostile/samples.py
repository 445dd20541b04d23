"""Files as the workbench and others write them, of every kind that it reads."""

import json
import re
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from PIL import Image
from safetensors.torch import save_file
from torch import nn

import workbench as wb
from tests.plan.graphs import mlp, transformer, vgg
from tests.plan.machines import machine
from workbench.hosts.remote.reception import Hello
from workbench.model.weights.exchange import write_weights
from workbench.store import messages
from workbench.store.cluster_spec import key_of
from workbench.train.data.datasets import FORMATS
from workbench.train.run.cells import Cell, CellFiles, Ending

NET = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 10))
LONG_S = 120.0
OWN = {"name": "planted_file:Thing"}
STATES = {"kind": "own", "given": OWN, "states": {"every": 2}}


def make(folder: Path) -> None:
    """Writes a folder for each kind of files; a cluster of one engine trains for it."""
    plans = {
        "vgg": wb.Plan.hybrid(vgg(), 4, 2),
        "attention": wb.Plan.hybrid(transformer(), 2),
        "mlp": wb.Plan.data_parallel(mlp(4, 4), 2, shares=(1.0, 2.0)),
    }
    experiment = wb.Experiment(plan=plans["mlp"], optimizer=wb.SGD(lr=0.1), steps=3, data="digits")
    for kind in ("plan", "experiment", "machine"):
        (folder / kind).mkdir(parents=True)
    for name, plan in plans.items():
        plan.save(folder / "plan" / f"{name}.toml")
    experiment.save(folder / "experiment" / "plain.toml")
    named = experiment.replace(
        data=wb.TorchData(train="planted_file:a", test="planted_live:b", samples=(8, 4)),
        loss="planted_live:loss",
        metrics={"f1": "planted_file:f1"},
        schedule="planted_live:rate",
        sync=wb.Synchronous(algorithm="planted_file:Ring"),
    )
    named.save(folder / "experiment" / "named.toml")
    machine().save(folder / "machine" / "machine.toml")
    weights(folder)
    pictures(folder / "pictures")
    (folder / "hello").mkdir()
    said = json.dumps(Hello.here("127.0.0.1", 1, "lo").plain())
    (folder / "hello" / "said.json").write_text(said)
    trained(folder)


def sign_off(folder: Path) -> None:
    """Has all descriptions of models the fingerprint that `Graph` has now."""
    for path in folder.rglob("*.toml"):
        now = f'fingerprint = "{mlp(4, 4).fingerprint}"'
        path.write_text(re.sub(r'fingerprint = "\w+"', now, path.read_text()))
    experiment = wb.Experiment.load(folder / "run" / "experiment.toml")
    key = (folder / "message" / "key").read_bytes()
    (folder / "message" / "experiment").write_bytes(messages.pack(experiment, key))
    (folder / "message" / "unsealed").write_bytes(messages.pack(experiment))
    with closing(sqlite3.connect(folder / "cluster" / "server.sqlite")) as store:
        new = messages.pack(experiment, key)
        store.execute("UPDATE packed SET bytes = ? WHERE what = 'packed'", (new,))
        store.commit()


def weights(folder: Path) -> None:
    """Weights in the formats of others."""
    state = {"net": {f"{n}.weight": torch.randn(4, n + 2) for n in range(5)}, "step": 7}
    flat = {f"net.{name}": tensor for name, tensor in state["net"].items()}
    dcp.save(
        {**state, "half": torch.ones(3).bfloat16()}, checkpoint_id=folder / "dcp", no_dist=True
    )
    write_weights(flat, folder / "split", "safetensors", most_bytes=100)
    (folder / "safetensors").mkdir()
    save_file(flat, folder / "safetensors" / "model.safetensors", {"note": "text"})


def pictures(folder: Path) -> None:
    """A folder of images of two classes, in every format that is decoded."""
    for place in (f"{split}/{name}" for split in ("train", "test") for name in "ab"):
        (folder / place).mkdir(parents=True)
        for kind in FORMATS:
            Image.new("RGB", (9, 9), (1, 2, 3)).save(folder / place / f"it.{kind.lower()}")


def trained(folder: Path) -> None:
    """What a run and its cluster leave, and what they say to each other."""
    graph = wb.trace(NET, input_shape=(1, 8, 8))
    experiment = wb.Experiment(
        plan=wb.Plan.data_parallel(graph, 1),
        data="digits",
        batch_size=64,
        optimizer=wb.SGD(lr=0.1, momentum=0.9),
        steps=2000,
        trace_every=3,
        evaluate_every=1000,
    )
    with wb.Cluster(1, directory=folder / "runs", name="sample") as cluster:
        run = cluster.train(experiment)
        run.set_lr(0.05)
        run.checkpoint_now()
        run.replan(wb.Plan.hybrid(graph, 1))
        run.wait(LONG_S)
        shutil.copytree(run.directory, folder / "run")
        shutil.copytree(cluster.folder, folder / "cluster", ignore=shutil.ignore_patterns("*.lock"))
        record = cluster.link.store.job(run.id)
        key = key_of(cluster.folder)
        (folder / "registry" / "workbench" / "clusters").mkdir(parents=True)
        note = folder / "registry" / "workbench" / "clusters" / "sample.cluster"
        note.write_text(str(folder / "cluster"))
    shutil.rmtree(folder / "runs")
    (checkpoint, *_) = sorted((folder / "run").glob("step-*"))
    shutil.copytree(checkpoint, folder / "checkpoint")
    (folder / "message").mkdir()
    packed = {
        "keywords": record.keywords,
        "answer": messages.Answer("returned", {"a": 1}).pack(key),
        "raised": messages.Answer.of(ValueError("x")).pack(),
    }
    for name, content in packed.items():
        (folder / "message" / name).write_bytes(content)
    (folder / "message" / "key").write_bytes(key)
    (folder / "cells").mkdir()
    files = CellFiles(folder / "cells")
    files.ask(1, Cell("1 + 1", (0,)))
    files.end(1, 0, Ending("done"))
