"""Data, loss and metrics of a person's own: what is accepted, and what they are known to be."""

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from tests.plan.graphs import mlp
from tests.plan.placement.test_tied import language
from workbench.plan import SGD, CrossEntropy, Experiment, ExperimentError, LocalSGD, Plan
from workbench.plan.experiment import task
from workbench.plan.experiment.task import (
    Digits,
    Loss,
    Metric,
    Synthetic,
    Text,
    TorchData,
    as_data,
    as_loss,
    as_metrics,
    is_iterated,
    made,
)
from workbench.plan.extension.user_object import Own

ROWS = [(torch.zeros(4), 0), (torch.ones(4), 1), (torch.ones(4), 0)]


class Stream(IterableDataset):
    """Samples in order, of no known number."""

    def __iter__(self):
        return iter(ROWS)


class Sized(Stream):
    """The same, which knows how many there are."""

    def __len__(self):
        return len(ROWS)


class Mapped(Dataset):
    """Samples by index, of no known number."""

    def __getitem__(self, index):
        return ROWS[index]


class Columns:
    """Rows in order, and columns by name, as a table has them."""

    def __iter__(self):
        return iter(ROWS)

    def __getitem__(self, name):
        return [row[name] for row in ROWS]


class Table(Columns):
    """Rows by index as well, with their number."""

    def __len__(self):
        return len(ROWS)


def test_the_sizes_of_data_that_is_made_or_shipped():
    assert Digits().known_samples == (1442, 355)
    assert Synthetic().known_samples == (1024, 256)
    assert Synthetic(samples=3).known_samples == (3, 1)
    assert Synthetic(samples=9).known_samples == (9, 2)
    assert Synthetic().classes == 10
    assert Text().known_samples is None


@pytest.mark.parametrize(("field", "least"), [("samples", 1), ("classes", 2)])
def test_the_least_of_synthetic_data(field, least):
    assert getattr(Synthetic(**{field: least}), field) == least
    with pytest.raises(ValueError, match=field):
        Synthetic(**{field: least - 1})


@pytest.mark.parametrize(
    ("data", "iterated"),
    [
        (ROWS, False),
        (TensorDataset(torch.zeros(3, 4)), False),
        (Table(), False),
        (Columns(), True),
        (Stream(), True),
        (Sized(), True),
        (iter(ROWS), False),
        (5, False),
    ],
)
def test_what_is_read_from_its_beginning(data, iterated):
    assert is_iterated(data) == iterated


def test_lengths_are_those_of_data_or_as_said():
    assert TorchData(train=ROWS).known_samples == (3, 0)
    assert TorchData(train=ROWS, test=ROWS[:2]).known_samples == (3, 2)
    assert TorchData(train=Stream(), samples=7).known_samples == (7, 0)
    assert TorchData(train=Stream(), test=Stream(), samples=(7, 2)).known_samples == (7, 2)
    assert TorchData(train=ROWS, samples=(7, 2)).known_samples == (3, 0)
    assert TorchData(train="tests.plan.experiment:ROWS").known_samples is None
    assert TorchData(train="a:b", test="a:c", samples=(4, 1)).known_samples == (4, 1)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"train": DataLoader(ROWS)}, "train: DataLoader gives batches"),
        ({"train": ROWS, "test": DataLoader(ROWS)}, "test: DataLoader gives batches"),
        ({"train": 5}, r"train: builtins\.int is no data set"),
        ({"train": iter(ROWS)}, "is no data set"),
        ({"train": Mapped()}, "is no data set"),
        ({"train": ROWS, "test": 5}, r"test: builtins\.int is no data set"),
        ({"train": Stream()}, r"train: Stream has neither \[index\] nor len"),
        ({"train": Sized(), "workers": 1}, r"iterates it, with workers=0, got 1"),
        ({"train": []}, "has no samples"),
        ({"train": "a:b", "test": "a:c", "samples": (0, 1)}, "has no samples"),
        ({"train": ROWS, "inputs": "x"}, "give both, or neither"),
        ({"train": ROWS, "targets": "y"}, "give both, or neither"),
        ({"train": ROWS, "workers": -1}, "workers"),
    ],
)
def test_data_that_cannot_be_read_is_refused(fields, said):
    with pytest.raises(ValueError, match=said):
        TorchData(**fields)


def test_data_that_can_be_read_is_taken():
    assert TorchData(train=Sized()).samples == (3, 0)
    assert TorchData(train=ROWS, workers=1).workers == 1
    assert TorchData(train=ROWS).workers == 0
    assert TorchData(train=ROWS, inputs="x", targets="y").targets == "y"
    assert TorchData(train=Table()).samples == (3, 0)


def test_the_title_is_the_last_part_of_a_name():
    assert TorchData(train="package.module:Kind.member").title == "member"
    assert TorchData(train=Stream(), samples=1).title == "Stream"
    assert Digits().title == "digits"


def test_what_is_given_for_data():
    assert as_data(None) is None
    digits = Digits()
    assert as_data(digits) is digits
    assert as_data({"kind": "digits"}) == {"kind": "digits"}
    assert as_data("digits") == "digits"
    both = as_data((ROWS, ROWS[:1]))
    assert (both.train.held, both.test.held) == (ROWS, ROWS[:1])
    assert as_data("a:b").train == Own(name="a:b")
    assert as_data("a:b").test is None
    assert as_data(ROWS).train.held is ROWS
    with pytest.raises(ValueError, match=r"\(train, test\), got 3 entries"):
        as_data((1, 2, 3))


def test_installed_data_is_found_by_its_name(monkeypatch):
    offered = {
        "both": Own(name=f"{__name__}:BOTH"),
        "one": Own(name=f"{__name__}:ROWS"),
        "digits": Own(name=f"{__name__}:ROWS"),
    }
    monkeypatch.setattr(task, "installed", lambda kind: offered if kind == "data" else {})
    assert (as_data("both").train, as_data("both").test) == (offered["both"], offered["both"])
    assert (as_data("one").train, as_data("one").test) == (offered["one"], None)
    assert as_data("digits") == "digits"
    assert as_data("other") == "other"


BOTH = (ROWS, ROWS[:1])


def make():
    """What a place may name: a function that makes a data set."""
    return ROWS


class Made(TensorDataset):
    """A class that makes one."""

    def __init__(self):
        super().__init__(torch.zeros(2, 4))


class Callable(Mapped):
    """A data set that can be called as well."""

    def __call__(self):
        raise AssertionError


CALLABLE = Callable()


def test_a_place_names_data_or_what_makes_it():
    assert made(Own(name=f"{__name__}:ROWS")) is ROWS
    assert made(Own(name=f"{__name__}:make")) is ROWS
    assert isinstance(made(Own(name=f"{__name__}:Made")), Made)
    assert made(Own(name=f"{__name__}:CALLABLE")) is CALLABLE
    assert made(Own.of(make)) is make


def test_a_loss_is_its_function_by_reduction():
    loss = Loss(torch.nn.functional.cross_entropy)
    assert loss.function.held is torch.nn.functional.cross_entropy
    assert loss.is_mean
    assert not Loss(torch.nn.MSELoss(), reduction="sum").is_mean
    assert Loss(function="a:b").function == Own(name="a:b")
    with pytest.raises(TypeError, match="function alone"):
        Loss(len, len)


def test_weights_are_those_of_a_mean():
    assert Loss(len, weights=len).weights.held is len
    assert Loss(len, reduction="sum").weights is None
    with pytest.raises(ValueError, match="weights are those of a mean"):
        Loss(len, reduction="sum", weights=len)


def test_a_metric_is_its_sums_and_their_result():
    assert Metric(len).sums.held is len
    assert Metric(len).result is None
    assert Metric(len, result=abs).result.held is abs
    with pytest.raises(TypeError, match="sums alone"):
        Metric(len, abs)


def test_functions_are_taken_for_losses_and_metrics():
    loss, metric = Loss(len), Metric(len)
    assert as_loss(None) is None
    assert as_loss(loss) is loss
    assert as_loss({"function": "a:b"}) == {"function": "a:b"}
    assert as_loss(len).function.held is len
    assert as_metrics("f1") == "f1"
    found = as_metrics({"a": metric, "b": {"sums": "a:b"}, "c": len})
    assert found["a"] is metric
    assert found["b"] == {"sums": "a:b"}
    assert found["c"].sums.held is len


def test_an_experiment_has_the_objects_that_it_is_given():
    given = Experiment(
        plan=Plan.data_parallel(mlp(4, 4), 2),
        data=(ROWS, ROWS),
        loss=torch.nn.functional.cross_entropy,
        metrics={"mean": len},
        optimizer=SGD(lr=0.1),
        steps=1,
    )
    assert given.data.train.held is ROWS
    assert given.loss.is_mean
    assert given.metrics["mean"].sums.held is len


def test_what_evaluations_report_besides_the_loss():
    fields = dict(data="synthetic", optimizer=SGD(lr=0.1), steps=1)
    labels = Experiment(plan=Plan.data_parallel(mlp(4, 4), 2), **fields)
    assert labels.figures == ("accuracy",)
    tokens = Experiment(plan=Plan.data_parallel(language(), 2), **fields)
    assert tokens.figures == ("accuracy", "perplexity")
    own = labels.replace(loss=torch.nn.functional.cross_entropy)
    assert own.figures == ()
    assert own.replace(metrics={"mean": len, "sum": len}).figures == ("mean", "sum")
    assert labels.replace(metrics={"mean": len}).figures == ("mean",)


def test_cross_entropy_says_what_counts():
    assert as_loss(CrossEntropy()) == CrossEntropy(ignore_index=-100)
    assert CrossEntropy().weighs
    assert CrossEntropy(ignore_index=None, weight=(1, 2)).weighs
    assert not CrossEntropy(ignore_index=None, label_smoothing=0.1).weighs


def test_a_weight_is_there_for_each_class():
    plan = Plan.data_parallel(mlp(64, 10), 2)
    classes = plan.graph.num_classes
    text = f"weight has one number for each class, and layer '.*' scores {classes}; got 3"
    with pytest.raises(ExperimentError, match=text):
        Experiment(
            plan=plan, data="digits", optimizer="sgd", steps=1,
            loss=CrossEntropy(weight=(1.0, 2.0, 0.5)),
        )  # fmt: skip
    with pytest.raises(ExperimentError, match="label_smoothing"):
        CrossEntropy(label_smoothing=1.5)


def test_weights_of_labels_add_up_over_the_batch():
    plan = Plan.data_parallel(mlp(64, 10), 2)
    fields = dict(plan=plan, data="digits", optimizer="sgd", steps=1, sync=LocalSGD(every=2))
    with pytest.raises(ExperimentError, match="loss: the weights of all rows of a batch add up"):
        Experiment(**fields, loss=CrossEntropy())
    Experiment(**fields, loss=CrossEntropy(ignore_index=None, label_smoothing=0.1))


def test_smoothed_cross_entropy_is_no_perplexity_s_logarithm():
    plan = Plan.data_parallel(language(), 2)
    fields = dict(plan=plan, data="text", optimizer="sgd", steps=1)
    assert Experiment(**fields, loss=CrossEntropy()).figures == ("accuracy", "perplexity")
    smoothed = Experiment(**fields, loss=CrossEntropy(label_smoothing=0.1))
    assert smoothed.figures == ("accuracy",)
    again = Experiment.from_toml(smoothed.to_toml())
    assert again == smoothed
