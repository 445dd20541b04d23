"""A user's own functions and objects reach the ranks as the notebook has them."""

import sys
from functools import lru_cache, partial
from threading import RLock
from types import ModuleType

import cloudpickle
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, IterableDataset, TensorDataset

import workbench as wb
from workbench.client.run.own_objects import kept
from workbench.model.tracing.trace import trace
from workbench.plan.experiment.experiment import SGD, Experiment, Metric, TorchData
from workbench.plan.extension.sealed import KEY_FILE
from workbench.plan.extension.user_object import OwnObjectError
from workbench.plan.io.errors import ExperimentError
from workbench.plan.plans.plan import Plan
from workbench.store import messages
from workbench.store.cluster_spec import KEY, key_of
from workbench.store.errors import RunError

DATA = (TensorDataset(torch.rand(8, 2), torch.arange(8) % 3),) * 2


@pytest.fixture
def key(tmp_path, monkeypatch) -> bytes:
    """That of the cluster that has this folder, which this process is an engine of."""
    monkeypatch.setenv(KEY_FILE, str(tmp_path / KEY))
    return key_of(tmp_path)


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 3))


def experiment(**fields):
    """Everything of it is made here, as in a cell."""

    class Corners(Dataset):
        def __len__(self):
            return 24

        def __getitem__(self, index):
            return torch.tensor([index % 2, index % 3]).float(), torch.tensor(index % 3)

    def loss(outputs, targets):
        return nn.functional.cross_entropy(outputs, targets, reduction="none")

    graph = trace(net(), input_shape=(2,))
    hits = Metric(lambda out, y: (out.argmax(1) == y).sum(), result=lambda n: n / 24)
    given = dict(
        data=TorchData(train=Corners(), test=Corners(), workers=1),
        loss=loss,
        metrics={"hits": hits},
        optimizer=SGD(0.1),
        epochs=2,
        batch_size=8,
    )
    return Experiment(plan=Plan.data_parallel(graph, 2), **given | fields)


@pytest.mark.slow
def test_they_are_files_named_by_their_content(tmp_path, key):
    run = experiment()
    there = kept(run, tmp_path)
    assert kept(there, tmp_path) == there
    assert kept(run, tmp_path) == there
    files = sorted(path.name for path in (tmp_path / "objects").iterdir())
    assert len(files) == 4  # both splits are one
    assert (tmp_path / "objects").stat().st_mode & 0o077 == 0
    back = messages.unpack(messages.pack(there, key), key)
    assert back.to_toml() == there.to_toml()
    assert len(back.data.train.opened().loaded) == 24
    assert back.metrics["hits"].result.opened().loaded(torch.tensor(12)) == 0.5


def test_modules_beside_the_notebook_travel_as_they_are_now(tmp_path, key, monkeypatch):
    """An engine may have imported another text of them, or have none."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "my_losses.py").write_text(
        "FACTOR = 2.0\n\ndef loss(o, y):\n    return FACTOR * o\n"
    )
    import my_losses

    there = kept(experiment(loss=my_losses.loss), tmp_path)
    monkeypatch.delitem(sys.modules, "my_losses")
    (tmp_path / "my_losses.py").unlink()
    back = messages.unpack(messages.pack(there, key), key)
    assert back.loss.function.opened().loaded(torch.ones(2), None).tolist() == [2.0, 2.0]


@pytest.mark.parametrize("folder", [sys.base_prefix, "/"])
def test_a_notebook_may_lie_above_python_itself(tmp_path, key, monkeypatch, folder):
    """As below a home folder that has pyenv in it: what is installed is no code of its own."""
    monkeypatch.chdir(folder)
    registered = cloudpickle.list_registry_pickle_by_value()
    there = kept(experiment(data=DATA, loss=nn.functional.l1_loss), tmp_path)
    assert cloudpickle.list_registry_pickle_by_value() == registered
    assert len(there.data.train.opened().loaded) == 8


def test_a_module_beside_the_notebook_may_have_two_names(tmp_path, key, monkeypatch):
    """And a name in `sys.modules` that is not its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "my_other_losses.py").write_text("def loss(o, y):\n    return 3.0 * o\n")
    import my_other_losses

    monkeypatch.setitem(sys.modules, "my_alias", my_other_losses)
    stranger = ModuleType("of_no_place")
    stranger.__file__ = str(tmp_path / "my_other_losses.py")
    monkeypatch.setitem(sys.modules, "my_loader.of_no_place", stranger)
    there = kept(experiment(data=DATA, loss=my_other_losses.loss), tmp_path)
    monkeypatch.delitem(sys.modules, "my_other_losses")
    monkeypatch.delitem(sys.modules, "my_alias")
    (tmp_path / "my_other_losses.py").unlink()
    back = messages.unpack(messages.pack(there, key), key)
    assert back.loss.function.opened().loaded(torch.ones(2), None).tolist() == [3.0, 3.0]


def test_what_is_installed_below_the_notebook_is_imported(tmp_path, key, monkeypatch):
    """Also where it is another environment's: it may be large, or compiled."""
    packages = tmp_path / "env" / "lib" / "site-packages"
    packages.mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(packages))
    (packages / "their_losses.py").write_text("def loss(o, y):\n    return o\n")
    import their_losses

    there = kept(experiment(data=DATA, loss=their_losses.loss), tmp_path)
    monkeypatch.delitem(sys.modules, "their_losses")
    (packages / "their_losses.py").unlink()
    back = messages.unpack(messages.pack(there, key), key)
    with pytest.raises(OwnObjectError, match="No module named 'their_losses'"):
        back.loss.function.opened()


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        (dict(loss="nowhere.at_all:loss"), "loss.function: 'nowhere.at_all:loss' cannot be loaded"),
        (dict(loss="math:nothing"), "has no attribute 'nothing'"),
        (
            dict(metrics={"m": partial(max, (_ for _ in ()))}),
            "metrics.m.sums: .*cannot be pickled",
        ),
        (dict(loss=partial(max, RLock())), "cannot be pickled.*or an attribute for functools.cach"),
    ],
)
def test_what_no_rank_could_have_is_refused(tmp_path, fields, text):
    with pytest.raises(ExperimentError, match=text):
        kept(experiment(**fields), tmp_path)


def test_what_is_cached_in_a_script_is_named_with_a_remedy(tmp_path, key, monkeypatch):
    @lru_cache
    def weight():
        return 2.0

    weight.__module__, weight.__qualname__ = "__main__", "weight"
    monkeypatch.setattr("__main__.weight", weight, raising=False)
    there = kept(experiment(loss=lambda o, y: weight() * o), tmp_path)
    monkeypatch.delattr("__main__.weight")
    with pytest.raises(OwnObjectError, match=r"'weight' on .*lru_cache.* into a file"):
        messages.unpack(messages.pack(there, key), key).loss.function.opened()


@pytest.mark.slow
def test_only_files_of_this_cluster_are_loaded(tmp_path, monkeypatch):
    """A text from somewhere could name a file that does anything."""
    elsewhere = kept(experiment(), tmp_path / "one")
    text = Experiment.from_toml(elsewhere.to_toml())
    with pytest.raises(ExperimentError, match=r"data.train: .*data=..., loss=..., metrics="):
        kept(text, tmp_path / "other")
    assert kept(elsewhere, tmp_path / "other") != elsewhere  # the objects are here, too
    with pytest.raises(OwnObjectError, match="only engines open"):
        text.data.train.opened()
    monkeypatch.setenv(KEY_FILE, str(tmp_path / "one" / KEY))
    assert len(text.data.train.opened().loaded) == 24
    monkeypatch.setenv(KEY_FILE, str(tmp_path / "other" / KEY))
    with pytest.raises(OwnObjectError, match="not written under this cluster's key"):
        text.data.train.opened()
    monkeypatch.setenv(KEY_FILE, str(tmp_path / "one" / KEY))
    (file,) = (tmp_path / "one" / "objects").glob("Corners-*")
    file.write_bytes(file.read_bytes() + b".")
    with pytest.raises(OwnObjectError, match="not written under this cluster's key"):
        text.data.train.opened()


def test_what_a_text_names_is_refused_all_at_once(tmp_path):
    text = experiment(loss="math:sqrt", metrics={"m": "math:cos"}).to_toml()
    again = Experiment.from_toml(text).replace(data="digits")
    with pytest.raises(ExperimentError, match=r"loss\.function: .*; metrics\.m\.sums: ") as raised:
        kept(again, tmp_path)
    assert "experiment.replace(loss=..., metrics=...)" in str(raised.value)
    trusted = Experiment.from_toml(text, trust=True).replace(data="digits")
    assert kept(trusted, tmp_path) == trusted


def test_the_text_of_an_object_is_not_the_object(tmp_path):
    again = Experiment.from_toml(experiment().to_toml())
    with pytest.raises(ExperimentError, match="was an object of the process that made the"):
        kept(again, tmp_path)


@pytest.mark.slow
def test_a_cluster_trains_and_verifies_it(cluster):
    run = experiment(evaluate_every=3)
    trained = cluster.train(run).wait()
    assert trained.evaluation.keys() == {"loss", "hits"}
    assert f"test hits {trained.evaluation['hits']:.4g}" in repr(trained)
    assert trained.experiment == run
    saved = Experiment.load(trained.directory / "experiment.toml")
    assert saved.to_toml() == trained.experiment.to_toml()
    found = cluster.verify(run)
    assert found.exact, found
    assert {d.name for d in found.differences if d.what == "evaluation"} == {"loss", "hits"}


@pytest.mark.slow
def test_a_cluster_reads_what_is_only_iterated(cluster):
    class Counting(IterableDataset):
        def __iter__(self):
            for index in range(24):
                yield torch.tensor([index % 2, torch.rand(())]), torch.tensor(index % 3)

    data = TorchData(train=Counting(), test=Counting(), samples=(24, 24))
    run = experiment(data=data, steps=5, epochs=None, schedule=lambda step: 1 / (1 + step))
    trained = cluster.train(run).wait()
    half = cluster.train(run.replace(steps=2)).wait()
    resumed = cluster.train(run, resume=half).wait()
    losses = [
        one.metrics.query("rank == 0").set_index("step")["loss"] for one in (trained, resumed)
    ]
    assert (losses[1] == losses[0].loc[2:]).all()
    found = cluster.verify(run)
    assert found.exact, found


def test_what_mixes_rows_is_refused_before_it_is_run(cluster):
    data = TensorDataset(torch.rand(8, 2), torch.arange(8) % 3)
    before, run = len(cluster.jobs), experiment(data=(data, data), loss=mixing, metrics=None)
    text = r"loss .*mixing of 8 rows is .* must not depend on others"
    for begin in (cluster.train, cluster.verify, lambda one: cluster.jobs.sweep(one, seed=(0, 1))):
        with pytest.raises(OwnObjectError, match=text):
            begin(run)
    assert len(cluster.jobs) == before


def few():
    """A data set that each rank makes."""
    return TensorDataset(torch.rand(8, 2), torch.arange(8) % 3)


def test_what_fails_on_a_rank_is_told_by_its_name(cluster):
    data = f"{__name__}:few"
    run = experiment(data=data, loss=mixing, metrics=None, steps=4, epochs=None)
    with pytest.raises(RunError, match=r"loss .*mixing of 8 rows is .* must not depend on others"):
        cluster.train(run).wait()


def mixing(outputs, targets):
    """Not a loss over rows."""
    return (outputs - outputs.mean(0)).square().mean()


def test_what_a_cell_says_of_the_workbench_travels_by_its_name(tmp_path, key):
    def loss(outputs, targets):
        assert wb.Plan is not None
        return outputs.sum(1)

    there = messages.unpack(messages.pack(kept(experiment(loss=loss), tmp_path), key), key)
    assert there.loss.function.opened().loaded(torch.ones(2, 3), None).tolist() == [3.0, 3.0]
