"""A user's own data: the same samples whoever reads them, and one clear error for what is wrong."""

import multiprocessing
import os
import random
import signal
from importlib.metadata import EntryPoint

import numpy as np
import pytest
import torch
from torch.testing import assert_close
from torch.utils.data import TensorDataset

from tests.train.data.spirals import Spirals, paired
from workbench.model.tracing.trace import trace
from workbench.plan.experiment.experiment import SGD, Experiment
from workbench.plan.experiment.task import TorchData
from workbench.plan.extension import extension
from workbench.plan.extension.user_object import OwnObjectError
from workbench.plan.graph.graph import Input
from workbench.plan.io.errors import ExperimentError
from workbench.plan.plans.plan import Plan
from workbench.train.data.datasets import open_data
from workbench.train.data.feed import Feed
from workbench.train.data.reading import DataError

# From Python 3.12 on: pytest has threads, and torch forks its workers.
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")

GRAPH = trace(torch.nn.Linear(2, 3), input_shape=(2,))


class Drawing:
    """Draws from all three generators."""

    def __len__(self):
        return 12

    def __getitem__(self, index):
        drawn = torch.rand(()), torch.tensor(np.random.rand()), torch.tensor(random.random())
        return torch.stack([drawn[0], drawn[1].float()]), drawn[2].float() + index


def made():
    """A factory, as "module:function" names it."""
    return Spirals(7, seed=2)


def both():
    """The same for both splits."""
    return Spirals(7, seed=2), Spirals(4, seed=3)


class Fixed:
    """A class with [index], which a place may name itself."""

    def __len__(self):
        return 5

    def __getitem__(self, index):
        return torch.tensor([float(index), 0.0]), torch.tensor(index % 3)


@pytest.mark.parametrize(
    ("place", "lengths"), [("made", (7, None)), ("both", (7, 4)), ("Fixed", (5, None))]
)
def test_installed_data_is_found_by_its_name(monkeypatch, place, lengths):
    def entry_points(group):
        assert group == "workbench.data"
        return [EntryPoint("mine", f"{__name__}:{place}", group)]

    monkeypatch.setattr(extension, "entry_points", entry_points)
    assert len(opened("mine")) == lengths[0]
    if lengths[1] is None:
        with pytest.raises(DataError, match="has no test split"):
            opened("mine", "test")
    else:
        assert len(opened("mine", "test")) == lengths[1]
    text = Experiment(
        plan=Plan.data_parallel(GRAPH, 1), data="mine", optimizer=SGD(0.1), steps=1, batch_size=4
    )
    monkeypatch.setattr(extension, "entry_points", lambda group: [])
    assert Experiment.from_toml(text.to_toml()) == text  # a text names the place itself


def opened(data, split="train", seed=0):
    value = Experiment(
        plan=Plan.data_parallel(GRAPH, 1), data=data, optimizer=SGD(0.1), steps=1, batch_size=4
    ).data
    return open_data(value, (Input((2,)),), 3, split, seed)


def test_a_sample_is_the_same_whoever_reads_it():
    samples = opened(Drawing())
    torch.manual_seed(5)
    before = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    inputs, targets = samples.batch(torch.tensor([3, 0, 7]), 2)
    after = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    assert torch.equal(before[0], after[0])
    assert before[1:] == after[1:]
    again = samples.batch(torch.tensor([7, 3]), 2)
    assert_close(again, (inputs[[2, 0]], targets[[2, 0]]), rtol=0, atol=0)
    assert not torch.equal(samples.batch(torch.tensor([3]), 3)[0], inputs[:1])
    assert not torch.equal(opened(Drawing(), seed=1).batch(torch.tensor([3]), 2)[0], inputs[:1])


@pytest.mark.parametrize("workers", [0, 2])
def test_a_feed_brings_each_rank_its_rows(workers):
    """Whatever is read ahead, also where a rank has no rows, and when it goes back."""
    data = TorchData(train=Spirals(23, 0, noise=0.1), collate=paired, workers=workers)
    plan = Plan.data_parallel(GRAPH, 3, (2, 1, 0))
    run = Experiment(plan=plan, data=data, optimizer=SGD(0.1), steps=7, batch_size=6, seed=3)
    samples = open_data(run.data, (Input((2,)),), 3, "train", run.seed)

    def batches(count):
        half = count // 2
        return [plan.rows_of(count - half), plan.rows_of(half)]

    feeds = [
        Feed(run, samples, rank, torch.device("cpu"), torch.float64, batches) for rank in range(3)
    ]
    for step in (0, 1, 2, 3, 4, 2, 3):
        epoch, position = divmod(step, 4)
        order = np.random.default_rng((3, epoch)).permutation(23)[6 * position : 6 * position + 6]
        whole, targets = samples.batch(torch.from_numpy(order), epoch)
        taken = [feed.take(step) for feed in feeds]
        assert [micro.first_row for micro in taken[0]] == [0, len(order) - len(order) // 2]
        every = [micro[index] for index in range(2) for micro in taken]
        assert_close(torch.cat([micro.inputs[0] for micro in every]), whole, rtol=0, atol=0)
        kinds = torch.cat([micro.targets["kind"] for micro in every])
        assert torch.equal(kinds, targets["kind"])
        assert [len(micro.inputs[0]) for micro in taken[2]] == [0, 0]
    for feed in feeds:
        feed.close()
    assert multiprocessing.active_children() == []


def test_keys_factories_and_pairs():
    by_key = opened(TorchData(train=Spirals(5, 0), inputs="point", targets="kind"))
    inputs, kinds = by_key.batch(torch.arange(5))
    assert inputs.shape == (5, 2)
    assert kinds.tolist() == [0, 1, 2, 0, 1]
    place = "tests.train.data.test_own_samples:made"
    assert len(opened(TorchData(train=place, inputs="point", targets="kind"))) == 7
    pair = TensorDataset(torch.rand(6, 2), torch.arange(6)), TensorDataset(torch.rand(4, 2))
    assert [len(opened(pair, split)) for split in ("train", "test")] == [6, 4]
    assert len(opened(pair[0]).batch(torch.arange(0))[1]) == 0


class Broken(Spirals):
    def __getitem__(self, index):
        if index == 3:
            raise OSError("disk on fire")
        return super().__getitem__(index)


class Uneven(Spirals):
    def __getitem__(self, index):
        sample = super().__getitem__(index)
        return sample if index != 2 else {"point": sample["point"]}


def labels_of(samples):
    return paired(samples)[0], [sample["kind"] for sample in samples]


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (
            TorchData(train=Broken(5, 0), inputs="point", targets="kind"),
            "train data .*Broken: sample 3 cannot be read: OSError: disk on fire "
            r"\(in __getitem__, line \d+ of test_own_samples.py\)",
        ),
        (
            TorchData(train=Uneven(5, 0), inputs="point", targets="kind"),
            "5 samples cannot be collated: KeyError",
        ),
        (TorchData(train=Spirals(5, 0)), r"mappings with the keys \['kind', 'point', 'weight'\]"),
        (TorchData(train=TensorDataset(torch.rand(5, 2))), r"\(inputs, targets\).*got list of 1"),
        (
            TorchData(train=TensorDataset(torch.rand(5, 3), torch.arange(5))),
            r"shape \(5, 3\), and the model reads \(5, 2\)",
        ),
        (
            TorchData(train=Spirals(5, 0), collate=labels_of),
            r"targets are tensors with a row for each sample, \[5, ...\]",
        ),
    ],
)
@pytest.mark.parametrize("workers", [0, 1])
def test_what_is_wrong_is_said_once(data, text, workers):
    samples = opened(data.replace(workers=workers))
    keys = [(0, index) for index in range(5)]
    read = samples.ahead(lambda: iter([keys])) if workers else map(samples.batch, [torch.arange(5)])
    with pytest.raises(DataError, match=text) as caught:
        list(read)
    assert "Traceback" not in str(caught.value)
    assert multiprocessing.active_children() == []


@pytest.mark.parametrize(
    ("dtype", "remedy"),
    [
        (torch.uint8, r"x.float\(\) / 255 gives them, in a transform .*vocabulary=...\), if they"),
        (torch.int64, r"x.float\(\) gives them, in a transform"),
        (torch.bool, r"x.float\(\) gives them.*or trace it with Input\(\(2,\), 'bool'\)"),
        (torch.complex64, r"x.abs\(\) gives some, torch.view_as_real"),
    ],
)
def test_what_is_no_real_number_is_refused(dtype, remedy):
    """Also of a model that reads one tensor, whose type is not said."""
    samples = opened(TensorDataset(torch.ones(5, 2, dtype=dtype), torch.arange(5)))
    said = f"the inputs are {dtype}, and the model reads real numbers: {remedy}"
    with pytest.raises(DataError, match=said):
        samples.batch(torch.arange(2))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_real_numbers_of_any_size_are_taken(dtype):
    samples = opened(TensorDataset(torch.ones(5, 2, dtype=dtype), torch.arange(5)))
    assert samples.batch(torch.arange(2))[0].dtype == dtype


class Dying(Spirals):
    def __getitem__(self, index):
        if index == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


@pytest.mark.parametrize("is_slow", [False, True], ids=["waiting", "computing"])
def test_a_worker_that_dies_is_told_where_its_data_is_read(is_slow):
    """As where memory is short. Whatever the rank does then, the error is that of a read."""
    value = TorchData(train=Dying(5, 0), inputs="point", targets="kind", workers=1)
    read = opened(value).ahead(lambda: iter([[(0, index)] for index in range(5)]))
    next(read)
    (worker,) = multiprocessing.active_children()
    if is_slow:
        worker.join()  # torch's handler of signals would raise here
    text = r"train data .*Dying: a worker that reads it ended: .* with workers=0 the rank itself"
    with pytest.raises(DataError, match=text):
        list(read)
    del worker
    assert multiprocessing.active_children() == []


def test_workers_that_cannot_be_started_are_told(monkeypatch):
    def fails(self):
        raise OSError("cannot allocate memory")

    monkeypatch.setattr(multiprocessing.Process, "start", fails)
    value = TorchData(train=Spirals(5, 0), inputs="point", targets="kind", workers=2)
    text = "train data .*Spirals: its 2 workers cannot be started: OSError: cannot allocate memory"
    with pytest.raises(DataError, match=text):
        next(opened(value).ahead(lambda: iter([[(0, 0)]])))


def test_what_is_no_data_set_is_refused():
    for given, text in (
        ([iter([1])], "needs len.. and .index., or to give a new iterator"),
        ((TensorDataset(torch.rand(0, 2)),) * 2, "has no samples"),
        ("no place", "no data 'no place'"),
        ((1, 2, 3), "got 3 entries"),
    ):
        value = given[0] if isinstance(given, list) else given
        with pytest.raises(ExperimentError, match=text):
            opened(value)
    with pytest.raises(OwnObjectError, match="cannot be loaded in this process: ModuleNotFound"):
        opened("nowhere.at_all:made")
    with pytest.raises(OwnObjectError, match=r"^json:dumps makes no data: TypeError: .*without"):
        opened("json:dumps")
    with pytest.raises(DataError, match="no test split"):
        opened(Spirals(5, 0), "test")
    with pytest.raises(ExperimentError, match="give both, or neither"):
        TorchData(train=Spirals(5, 0), inputs="point")


def test_epochs_are_steps_of_whole_passes():
    plan = Plan.data_parallel(GRAPH, 2)
    run = Experiment(plan=plan, data=Spirals(23, 0), optimizer="sgd", epochs=3, batch_size=6)
    assert run.steps == 12
    assert run.replace(batch_size=8).steps == 9
    assert run.replace(epochs=1).steps == 4
    assert run.replace(steps=5).epochs is None
    assert Experiment.from_toml(run.to_toml()).steps == 12
    with pytest.raises(ExperimentError, match="are 12 steps, got 5"):
        Experiment(plan=plan, data=Spirals(23, 0), optimizer="sgd", epochs=3, steps=5, batch_size=6)
    with pytest.raises(ExperimentError, match="not known before it is opened"):
        Experiment(plan=plan, data="nowhere:made", optimizer="sgd", epochs=3)
