"""Tries what a user has brought to an experiment in the user's own process, before it is run.

So a loss that fails, or a data set whose samples differ from read to read, is an error where it is
given, with the user's own traceback, and not one of a rank a minute later.
"""

from contextlib import suppress

import torch

from workbench.client.run.own_objects import by_value
from workbench.plan.experiment.experiment import Experiment, Loss, Synthetic, TorchData
from workbench.plan.experiment.task import Text
from workbench.plan.extension.user_object import Own, OwnObjectError
from workbench.train.data.copied import Reads, copied, held_by
from workbench.train.data.datasets import Dataset, open_for
from workbench.train.data.reading import DataError
from workbench.train.data.samples import SHARED_BYTES, OwnSamples, try_samples
from workbench.train.run.scoring import Scoring
from workbench.train.step.loss import OwnLoss, Seen
from workbench.train.step.trial import ROWS, LossTrial, Trial, check_classes

_CPU = torch.device("cpu")


def try_out(experiment: Experiment) -> Seen | None:
    """Tries the data sets, the loss and the metrics of an experiment that are the user's own.

    Data that ranks make, from "module:function", is not made here.

    Returns:
        The range in which the loss was tried; None: it is not the user's own, or was not tried.

    Raises:
        DataError: a sample or a batch depends on more than its index, or does not fit the model.
        OwnObjectError: the loss or a metric fails, or depends on more than the rows it is given;
            or it, or the data, reads the model itself.
    """
    graph, rows, loss = experiment.plan.graph, experiment.batch_size, None
    held = held_by(graph.source.module)
    with by_value():
        opened = [_opened(experiment, split) for split in ("train", "test")]
        train, test = (copied(data, held, shared_bytes=SHARED_BYTES) for data in opened)
        for data in (train, test):
            if isinstance(data, OwnSamples):
                with Reads(held) as reads:
                    try_samples(data)
                _refuse(data.name, reads)
        dtype = torch.float64 if experiment.precision == "fp64" else torch.float32
        if isinstance(experiment.loss, Loss):
            loss = OwnLoss(experiment.loss, None, _CPU, dtype)
            if train is not None:
                tried = Trial.of(graph, train, _CPU, dtype, rows)
                LossTrial(loss, held).check(tried, rows)
        elif isinstance(train, OwnSamples):
            check_classes(graph, train, *filter(None, [experiment.loss]))
        if experiment.metrics and test is not None:
            tried = Trial.of(experiment.plan.evaluation.graph, test, _CPU, dtype)
            with Reads(held) as reads:
                Scoring.of(experiment, loss, tried)
            _refuse(f"metrics {', '.join(experiment.metrics)}", reads)
    return None if loss is None else loss.seen


def _refuse(name: str, reads: Reads) -> None:
    if reads.names:
        raise OwnObjectError(
            f"{name} read {reads.names[0]!r} of the model itself. Ranks have a copy of it, which "
            "nothing updates: let forward return what is needed, as an auxiliary output, or give "
            "another model, copy.deepcopy(model), which stays as it is"
        )


def _opened(experiment: Experiment, split: str) -> Dataset | None:
    """A split in this process; of pictures, labels such as they have. None: it is not here."""
    data, graph = experiment.data, experiment.plan.graph
    if isinstance(data, Synthetic | Text):
        return open_for(graph, data, "train", experiment.seed)
    if not isinstance(data, TorchData):
        labels = Synthetic(samples=ROWS, classes=max(2, graph.num_classes))
        with suppress(DataError):  # the model's outputs are no scores of classes
            return open_for(graph, labels, "train")
        return None
    own: Own | None = data.train if split == "train" else data.test
    if own is None or own.held is None:
        return None
    return open_for(graph, data, "train" if split == "train" else "test", experiment.seed)
