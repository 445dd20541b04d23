"""A user's own problem: data sets, the loss, and what evaluations report."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, TypeAdapter, model_validator

from workbench.plan.extension.extension import installed
from workbench.plan.extension.user_object import Own, OwnFunction, OwnObject, OwnObjectError
from workbench.plan.graph.graph import Graph
from workbench.plan.io.value import Value, by_name


def _both(given: object) -> object:
    """The lengths of both splits, where that of the first alone is given."""
    return (given, 0) if isinstance(given, int) else given


class DataSet(Value):
    """Samples to train and to evaluate on."""

    @property
    def known_samples(self) -> tuple[int, int] | None:
        """The samples of the training and of the test split, if they are known without loading."""
        return None

    @property
    def title(self) -> str:
        """What it is called in a line about an experiment."""
        kind: str = getattr(self, "kind", type(self).__name__)
        return kind


class Digits(DataSet):
    """scikit-learn's 1,797 real 8x8 grey images of ten digits, resized to the model's input."""

    kind: Literal["digits"] = "digits"

    @property
    def known_samples(self) -> tuple[int, int]:
        """The samples of the training and of the test split."""
        return 1442, 355


class Synthetic(DataSet):
    """Seeded images drawn around one centre for each class: learnable, of any shape and size."""

    kind: Literal["synthetic"] = "synthetic"
    samples: int = Field(default=1024, ge=1)
    """Images of the training split; the test split has a quarter as many."""
    classes: int = Field(default=10, ge=2)
    """Classes of images, each drawn around a centre of its own."""

    @property
    def known_samples(self) -> tuple[int, int]:
        """The samples of the training and of the test split."""
        return self.samples, max(1, self.samples // 4)


class CIFAR10(DataSet):
    """60,000 32x32 color images of ten classes, through torchvision."""

    kind: Literal["cifar10"] = "cifar10"
    root: str = "data"
    """Folder that holds, or receives, the data set."""
    download: bool = False
    """Whether what the folder lacks is fetched."""


class Text(DataSet):
    """The bytes of a text, in sequences as long as the model reads; of each byte, the next one.

    Every tenth sequence is the test split's. It is for models that read ids of 256 tokens or more,
    and score as many classes for each.
    """

    kind: Literal["text"] = "text"
    file: str | None = None
    """A file; None: the sources of Python's standard library, which every machine has. Where ranks
    are on several hosts, all of them need the same."""


class ImageFolder(DataSet):
    """A folder with `train/<class>/*` and `test/<class>/*` images, through torchvision."""

    kind: Literal["imagefolder"] = "imagefolder"
    root: str
    """The folder."""


class TorchData(DataSet):
    """Data sets of your own: any `torch.utils.data.Dataset`, or what reads like one.

    A batch is what `collate` makes of samples: the inputs, one tensor [rows, *input_shape], and the
    targets, a tensor or any nesting of tensors with a row for each sample. Of a model that reads
    several inputs they are a mapping by their names, or a tuple in the order in which they were
    declared. A rank reads its own rows only. The order of samples follows from the experiment's
    seed and the epoch alone.

    While a sample is read, the generators of torch, numpy and Python are seeded by the
    experiment's seed, the epoch and the sample's index: random transforms give the same on any
    rank and in any worker, after a resume too. The test split is read alike in every epoch.

    A data set without `[index]` is iterated once an epoch by every rank, which keeps its own rows:
    so it must give the same to all, whichever rank or worker it is in. Its samples come in its own
    order, and its `set_epoch` is called, if it has one. Give its length as `samples`; a run that is
    resumed goes through what it has used already.

    Raises:
        ExperimentError: a data set has neither a length and `[index]` nor can be iterated again
            and again; or is iterated, and has workers or no known length.
    """

    kind: Literal["torch"] = "torch"
    train: OwnObject
    """A data set, or "module:attribute" of one, of (train, test), or of what makes either."""
    test: OwnObject | None = None
    """The split to evaluate on; None: nothing is evaluated. Of a place that has (train, test), each
    split is its own."""
    collate: OwnObject | None = None
    """Makes a batch of a list of samples; None: torch's `default_collate`."""
    inputs: str | tuple[str, ...] | None = None
    """Of batches that are mappings, the key of the inputs; or the keys of several, which are the
    names of forward's parameters."""
    targets: str | None = None
    """The key of the targets."""
    workers: int = Field(default=0, ge=0)
    """Processes of each rank that read ahead; 0: the rank reads when it needs the rows."""
    samples: Annotated[tuple[int, int] | None, BeforeValidator(_both)] = None
    """The lengths of both, or of `train` alone, where they are known before they are opened; None:
    those that data sets say themselves."""

    @model_validator(mode="after")
    def _can_be_read(self) -> Self:
        for split, own in (("train", self.train), ("test", self.test)):
            held = None if own is None else own.held
            if held is None:
                continue
            if hasattr(held, "batch_sampler"):
                raise ValueError(
                    f"{split}: {type(held).__name__} gives batches: give its dataset, its "
                    "collate function and workers; the experiment has batch_size and seed"
                )
            if is_iterated(held):
                self._check_iterated(split, held)
            elif not (hasattr(held, "__len__") and hasattr(held, "__getitem__")):
                raise ValueError(
                    f"{split}: {own} is no data set: it needs len() and [index], or to give a new "
                    "iterator each time; what can be iterated once can be collected first, "
                    "list(data)"
                )
        said = self.samples or (None, None)
        lengths = (_length(self.train, said[0]), _length(self.test, said[1]))
        if None not in lengths:
            self.__dict__["samples"] = lengths
        if self.samples is not None and self.samples[0] == 0:
            raise ValueError(f"train: {self.train} has no samples")
        if (self.inputs is None) != (self.targets is None):
            raise ValueError("inputs and targets are the keys of a mapping: give both, or neither")
        return self

    def _check_iterated(self, split: str, held: object) -> None:
        name = type(held).__name__
        if self.workers:
            raise ValueError(
                f"{split}: {name} has no [index]: each rank iterates it, with workers=0, got "
                f"{self.workers}"
            )
        if self.samples is None and not hasattr(held, "__len__"):
            raise ValueError(
                f"{split}: {name} has neither [index] nor len(): give how many samples an epoch "
                "and the test split have, samples=(train, test)"
            )

    @property
    def known_samples(self) -> tuple[int, int] | None:
        """The samples of the training and of the test split, if they are known without loading."""
        return self.samples

    @property
    def title(self) -> str:
        """The name of the class or function of its training split."""
        return str(self.train).rpartition(":")[2].rpartition(".")[2]


def is_iterated(data: object) -> bool:
    """Whether a data set is read from its beginning, and gives a new iterator each time.

    It is so for what torch's `DataLoader` takes for iterable, and for what has not both a length
    and `[index]`: some have `[name]` of a column.
    """
    kinds = {(kind.__module__, kind.__name__): kind for kind in type(data).__mro__}
    again = hasattr(data, "__iter__") and not hasattr(data, "__next__")
    if (_TORCH, "IterableDataset") in kinds:
        return again
    kinds.pop((_TORCH, "Dataset"), None)  # its [index] only says that there is none
    indexed = any("__getitem__" in vars(kind) for kind in kinds.values())
    return again and not (indexed and hasattr(data, "__len__"))


_TORCH = "torch.utils.data.dataset"


def _length(own: Own | None, said: int | None) -> int | None:
    """The length of a split; None: it is not known here."""
    if own is None:
        return 0
    return len(own.held) if hasattr(own.held, "__len__") else said


class Loss(Value):
    """A loss of your own, as a sum over rows.

    The gradient is that of the loss of the whole batch in one process, whatever rows each rank and
    each micro-batch has. So the loss of some rows must not depend on others: that is tried before
    the first step, and a loss that mixes rows is refused.

    Raises:
        TypeError: more than the function is given without a name.
    """

    function: OwnFunction
    """(outputs, targets) -> a loss for each row [rows], or a number: what `reduction` makes of
    these rows. Outputs are what the module returns: one tensor, or a tuple of them. A
    `torch.nn.Module` without parameters to train is valid, too."""
    reduction: Literal["mean", "sum"] = "mean"
    """Over all rows of the batch."""
    weights: OwnObject | None = None
    """(targets) -> a weight for each row [rows], for a weighted mean over the batch: the function
    gives a loss for each row, and the sum of weighted losses is divided by that of the weights."""

    def __init__(self, /, *function: Any, **fields: Any) -> None:
        if len(function) > 1:
            raise TypeError("Loss takes its function alone without a name")
        super().__init__(**dict(zip(("function",), function, strict=False)), **fields)

    @model_validator(mode="after")
    def _weights_are_of_a_mean(self) -> Self:
        if self.weights is not None and not self.is_mean:
            raise ValueError("weights are those of a mean: with reduction='sum' multiply by them")
        return self

    @property
    def weighs(self) -> bool:
        """Whether rows count unequally, so that the ranks add up what they count."""
        return self.weights is not None

    @property
    def is_mean(self) -> bool:
        """Whether the sum over rows is divided by their number, or their weights."""
        return self.reduction == "mean"


_Weight = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class CrossEntropy(Value):
    """Cross-entropy, as `torch.nn.CrossEntropyLoss` has it of the numbers of classes.

    It is the sum of the losses of all labels of the batch that are not ignored, each times the
    weight of its class, divided by the sum of these weights. Auxiliary heads have a part of 0.3.
    Where the classes of an output are cut over ranks, they stay so: of the scores their maxima and
    sums travel alone.
    """

    kind: Literal["cross_entropy"] = "cross_entropy"
    ignore_index: int | None = -100
    """Labels of this value count nothing, in evaluations neither; None: every label is a class."""
    label_smoothing: float = Field(default=0.0, ge=0, le=1)
    """The part of a label that is spread evenly over all classes."""
    weight: tuple[_Weight, ...] | None = None
    """The weight of each class; None: 1."""

    @property
    def weighs(self) -> bool:
        """Whether labels count unequally, so that the ranks add up what they count."""
        return self.ignore_index is not None or self.weight is not None

    @property
    def is_plain(self) -> bool:
        """Whether it is the logarithm of a perplexity."""
        return self.weight is None and self.label_smoothing == 0

    def check(self, graph: Graph) -> None:
        """Checks that there is a weight for each class.

        Raises:
            ValueError: an output has another number of classes.
        """
        for name in graph.outputs if self.weight is not None else ():
            classes = graph[name].output_shape[-1 if graph.scores_tokens else 0]
            if classes != len(self.weight or ()):
                raise ValueError(
                    f"loss: weight has one number for each class, and layer {name!r} scores "
                    f"{classes}; got {len(self.weight or ())}"
                )


AnyLoss = Loss | CrossEntropy
"""A function of one's own, or torch's cross-entropy with its options."""


class Metric(Value):
    """A figure of evaluations, made of sums over the rows of the test split.

    For example, the F1 score of one class is made of three counts:

        Metric(lambda out, y: torch.stack([hits(out, y), claimed(out), there(y)]),
               result=lambda n: 2 * n[0] / (n[1] + n[2]))

    Raises:
        TypeError: more than the sums are given without a name.
    """

    sums: OwnFunction
    """(outputs, targets) -> a number for each row [rows]; or, with a `result`, the sums over these
    rows [...]: one tensor, of the same shape for any rows."""
    result: OwnObject | None = None
    """Sums over the whole split -> the figure; None: the mean over its rows."""

    def __init__(self, /, *sums: Any, **fields: Any) -> None:
        if len(sums) > 1:
            raise TypeError("Metric takes its sums alone without a name")
        super().__init__(**dict(zip(("sums",), sums, strict=False)), **fields)


def as_loss(given: object) -> object:
    """A function, or its place, for a `Loss` by it."""
    if given is None or isinstance(given, Value | Mapping):
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
        return TorchData(train=given) if ":" in given else _installed(given)
    return TorchData(train=given)


def made(own: Own) -> Any:
    """What a place has: a data set or (train, test), or what the function or class there makes."""
    found = own.loaded
    is_made = isinstance(found, type) or not hasattr(found, "__getitem__")
    if not (own.is_imported and callable(found) and is_made):
        return found
    try:
        return found()
    except Exception as error:  # whatever its own code raises
        raise OwnObjectError(
            f"{own} makes no data: {type(error).__name__}: {error}; 'module:attribute' is a data "
            "set, a pair (train, test), or a function or class that makes one without arguments"
        ) from error


def with_steps(given: dict[str, Any]) -> dict[str, Any]:
    """The fields of an experiment, with the steps that follow from its epochs or tokens."""
    size, steps = given.get("batch_size", 128), given.get("steps")
    counts = {name: given[name] for name in ("epochs", "tokens") if given.get(name) is not None}
    if len(counts) > 1:
        raise ValueError("epochs and tokens exclude each other: one of them says how many steps")
    if not all(isinstance(count, int) and count >= 1 for count in (*counts.values(), size)):
        return given  # as the fields' own checks say
    if "epochs" in counts and "data" in given:
        data = TypeAdapter(Data).validate_python(given["data"])
        if data.known_samples is None:
            raise ValueError(
                f"epochs: how many samples {data.kind!r} has is not known before it is opened; "
                "give steps"
            )
        samples, count = data.known_samples[0], counts["epochs"]
        due, said = count * -(-samples // size), f"{count} epochs of {samples} samples by {size}"
        given = {**given, "data": data}
    elif "tokens" in counts and "plan" in given:
        graph, count = given["plan"].graph, counts["tokens"]
        if not graph.scores_tokens:
            raise ValueError(
                f"tokens: {graph.source.name} does not give scores of tokens that it reads; give "
                "steps or epochs"
            )
        each = graph.shape_of(graph.outputs[0])[0]
        due, said = -(-count // (size * each)), f"{count} tokens by {size} samples of {each}"
    else:
        return given
    if steps not in (None, due):
        raise ValueError(f"steps: {said} are {due} steps, got {steps}; give one of the two")
    return {**given, "steps": due}


def check_evaluated(data: DataSet, asked: Sequence[str]) -> None:
    """Checks that there is a split to evaluate on, where something is asked that needs one."""
    if asked and isinstance(data, TorchData) and data.test is None:
        raise ValueError(
            f"{asked[0]}: nothing is evaluated, as data has no test split; give "
            f"data=(train, test), or leave {' and '.join(asked)} out"
        )


_BUILT_IN = ("digits", "synthetic", "text", "cifar10", "imagefolder")


def _installed(name: str) -> object:
    """The data of an installed package, by the name of its entry point; else the name."""
    own = None if name in _BUILT_IN else installed("data").get(name)
    if own is None:
        return name
    is_pair = isinstance(made(own.marked(name)), tuple)
    return TorchData(train=own, test=own if is_pair else None)


Data = Annotated[
    Annotated[
        Digits | Synthetic | Text | CIFAR10 | ImageFolder | TorchData, Field(discriminator="kind")
    ],
    by_name(
        "data",
        {"digits": Digits, "synthetic": Synthetic, "text": Text, "cifar10": CIFAR10},
        "ImageFolder(root), a torch Dataset, two of them (train, test), 'module:function', and the "
        "name of an installed one",
    ),
    BeforeValidator(as_data),
]
