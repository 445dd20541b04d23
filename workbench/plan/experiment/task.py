"""A user's own problem: data sets, the loss, and what evaluations report."""

from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from workbench.plan.experiment.own import OwnObject
from workbench.plan.value import Value


class DataSet(Value):
    """Samples to train and to evaluate on."""

    @property
    def known_samples(self) -> tuple[int, int] | None:
        """The samples of the training and of the test split, if they are known without loading."""
        return None


class TorchData(DataSet):
    """Data sets of your own: any map-style `torch.utils.data.Dataset`, or what reads like one.

    A batch is what `collate` makes of samples: the inputs, one tensor [rows, *input_shape], and the
    targets, a tensor or any nesting of tensors with a row for each sample. A rank reads its own
    rows only. The order of samples follows from the experiment's seed and the epoch alone.

    While a sample is read, the generators of torch, numpy and Python are seeded by the
    experiment's seed, the epoch and the sample's index: random transforms give the same on any
    rank and in any worker, after a resume too. The test split is read alike in every epoch.

    Raises:
        ExperimentError: a data set has no length or no `[index]`.
    """

    kind: Literal["torch"] = "torch"
    train: OwnObject
    """A data set, or "module:function" of what makes it."""
    test: OwnObject | None = None
    """The split to evaluate on; None: nothing is evaluated."""
    collate: OwnObject | None = None
    """Makes a batch of a list of samples; None: torch's `default_collate`."""
    inputs: str | None = None
    """Of batches that are mappings, the key of the inputs."""
    targets: str | None = None
    """The same for the targets."""
    workers: int = Field(default=0, ge=0)
    """Processes of each rank that read ahead; 0: the rank reads when it needs the rows."""
    samples: tuple[int, int] | None = None
    """The lengths of both, where they are known before they are opened."""

    @model_validator(mode="after")
    def _can_be_read(self) -> Self:
        for split, own in (("train", self.train), ("test", self.test)):
            held = None if own is None else own.held
            if held is None:
                continue
            if not (hasattr(held, "__len__") and hasattr(held, "__getitem__")):
                raise ValueError(
                    f"{split}: {own} is no map-style data set: it needs len() and [index], so that "
                    "each rank reads its own rows alone, in an order that the seed decides; what "
                    "only iterates can be collected first, list(data)"
                )
            if split == "train" and len(held) == 0:
                raise ValueError(f"train: {own} has no samples")
        if self.train.held is not None and (self.test is None or self.test.held is not None):
            lengths = (len(self.train.held), 0 if self.test is None else len(self.test.held))
            self.__dict__["samples"] = lengths
        if (self.inputs is None) != (self.targets is None):
            raise ValueError("inputs and targets are the keys of a mapping: give both, or neither")
        return self

    @property
    def known_samples(self) -> tuple[int, int] | None:
        """The samples of the training and of the test split, if they are known without loading."""
        return self.samples


class Loss(Value):
    """A loss of your own, as a sum over rows.

    The gradient is that of the loss of the whole batch in one process, whatever rows each rank and
    each micro-batch has. So the loss of some rows must not depend on others: that is tried before
    the first step, and a loss that mixes rows is refused.
    """

    function: OwnObject
    """(outputs, targets) -> a loss for each row [rows], or a number: what `reduction` makes of
    these rows. Outputs are what the module returns: one tensor, or a tuple of them. A
    `torch.nn.Module` without parameters to train is valid, too."""
    reduction: Literal["mean", "sum"] = "mean"
    """Over all rows of the batch."""
    weights: OwnObject | None = None
    """(targets) -> a weight for each row [rows], for a weighted mean over the batch: the function
    gives a loss for each row, and the sum of weighted losses is divided by that of the weights."""

    def __init__(self, *function: Any, **fields: Any) -> None:
        if len(function) > 1:
            raise TypeError("Loss takes its function alone without a name")
        super().__init__(**dict(zip(("function",), function, strict=False)), **fields)

    @model_validator(mode="after")
    def _weights_are_of_a_mean(self) -> Self:
        if self.weights is not None and not self.is_mean:
            raise ValueError("weights are those of a mean: with reduction='sum' multiply by them")
        return self

    @property
    def is_mean(self) -> bool:
        """Whether the sum over rows is divided by their number, or their weights."""
        return self.reduction == "mean"


class Metric(Value):
    """A figure of evaluations, made of sums over the rows of the test split.

    For example, the F1 score of one class is made of three counts:

        Metric(lambda out, y: torch.stack([hits(out, y), claimed(out), there(y)]),
               result=lambda n: 2 * n[0] / (n[1] + n[2]))
    """

    sums: OwnObject
    """(outputs, targets) -> a number for each row [rows]; or, with a `result`, the sums over these
    rows [...]: one tensor, of the same shape for any rows."""
    result: OwnObject | None = None
    """Sums over the whole split -> the figure; None: the mean over its rows."""

    def __init__(self, *sums: Any, **fields: Any) -> None:
        if len(sums) > 1:
            raise TypeError("Metric takes its sums alone without a name")
        super().__init__(**dict(zip(("sums",), sums, strict=False)), **fields)


def as_loss(given: object) -> object:
    """A function, or its place, for a `Loss` by it."""
    if given is None or isinstance(given, Loss | Mapping):
        return given
    return Loss(given)


def as_metrics(given: object) -> object:
    """The same for the metrics, by name."""
    if not isinstance(given, Mapping):
        return given
    return {
        name: one if isinstance(one, Metric | Mapping) else Metric(one)
        for name, one in given.items()
    }


def as_data(given: object) -> object:
    """One data set, or one to train on and one to evaluate on, for `TorchData` of them."""
    if given is None or isinstance(given, Value | Mapping):
        return given
    if isinstance(given, tuple):
        if len(given) != 2:
            raise ValueError(f"a tuple of data is (train, test), got {len(given)} entries")
        return TorchData(train=given[0], test=given[1])
    if isinstance(given, str):
        return TorchData(train=given) if ":" in given else given
    return TorchData(train=given)
