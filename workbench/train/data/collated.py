"""Batches of samples: inputs in the model's order, and targets."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import default_collate

from workbench.model.record.python_state import State, Walk, moved
from workbench.plan.extension.user_object import is_looked_at
from workbench.plan.graph.graph import Input
from workbench.train.data.reading import DataError, Generators

Inputs = Tensor | tuple[Tensor, ...]
"""Of each of the model's inputs [rows, *its shape]; of a model that reads one, that tensor."""

Batch = tuple[Inputs, Any]
"""Inputs and targets."""

_RECIPE = (
    "Let the data set do it, sample by sample: in __getitem__ draw what is random, and the index "
    "of a sample to mix with, torch.randint(len(self), ()); there, generators follow from the "
    "seed and the index"
)


class Collated:
    """Makes inputs and targets of a list of samples.

    A function of the user's own is tried by halves of some batches: a rank collates its own rows.

    Args:
        inputs: the key of the inputs, where batches are mappings, or of each of several; None: they
            are pairs.
    """

    def __init__(
        self,
        collate: Callable[[list[Any]], Any],
        inputs: str | tuple[str, ...] | None,
        targets: str | None,
        read: Sequence[Input],
        name: str,
    ) -> None:
        self._collate, self._inputs, self._targets = collate, inputs, targets
        self._read, self._name, self._calls = read, name, 0
        self.is_own = collate is not default_collate

    def __call__(self, samples: list[Any]) -> Batch:
        """Inputs and targets of these samples.

        Raises:
            DataError: the function fails, gives something else than a pair, mixes rows, leaves some
                out, or draws at random.
        """
        batch = self._batch(samples)
        if self.is_own and len(samples) > 1:
            self._calls += 1
            if is_looked_at(self._calls):
                self._look(samples, batch)
        return batch

    def _batch(self, samples: list[Any]) -> Batch:
        try:
            batch = self._collate(samples)
        except Exception as error:
            raise DataError(
                f"{self._name}: {len(samples)} samples cannot be collated: "
                f"{type(error).__name__}: {error}"
            ) from error
        inputs, targets = self._pair(batch)
        ordered = self._in_order(inputs)
        first = ordered if isinstance(ordered, Tensor) else ordered[0]
        if first.ndim and len(first) < len(samples):
            raise DataError(
                f"{self._name}: the collate function gives {len(first)} rows for {len(samples)} "
                "samples, and every sample is a row of some rank: leave samples out before, "
                "torch.utils.data.Subset(data, indices of those to keep)"
            )
        return ordered, targets

    def _look(self, samples: list[Any], batch: Batch) -> None:
        """Collates the samples by parts, as ranks do."""
        half, drawn, before = len(samples) // 2, Generators.now(), self.state()
        parts = [self._batch(samples[:half]), self._batch(samples[half:])]
        if moving := drawn.moved():
            raise DataError(
                f"{self._name}: the collate function draws random numbers ({', '.join(moving)}), "
                f"and each rank collates its own rows. {_RECIPE}"
            )
        if changed := moved(before, self.state()):
            raise DataError(
                f"{self._name}: the collate function keeps state: a call changes "
                f"{', '.join(changed)}. Each rank has a copy of its own, which collates other rows"
            )
        if said := _rows_differ(batch, parts):
            raise DataError(
                f"{self._name}: the collate function mixes rows: {said} of {len(samples)} samples "
                f"differ from those of the same samples by halves, as ranks have them. {_RECIPE}"
            )

    def state(self) -> State:
        return Walk().of(self._collate, "it")

    def _in_order(self, inputs: Any) -> Inputs:
        """The inputs in the model's order.

        Raises:
            DataError: they are not those that it reads.
        """
        names = [one.name for one in self._read]
        if isinstance(inputs, Mapping) and names != [""]:
            keys = list(map(str, inputs))
            if set(keys) != set(names):
                raise DataError(
                    f"{self._name}: the inputs of a batch are {', '.join(sorted(keys))}, and the "
                    f"model reads {', '.join(names)}: a collate function can leave out, and "
                    "wb.trace(module, inputs={...}) declares"
                )
            found = [inputs[name] for name in names]
        elif isinstance(inputs, tuple | list) and len(inputs) == len(names) > 1:
            found = list(inputs)
        else:
            found = [inputs]
        if len(found) != len(names):
            raise DataError(
                f"{self._name}: the model reads {', '.join(names)}, and the inputs of a batch are "
                f"{_described(inputs)}: a mapping with these keys is wanted, or a tuple in this "
                "order"
            )
        for each in found:
            if not isinstance(each, Tensor):
                raise DataError(
                    f"{self._name}: the inputs of a batch are one tensor, or one for each that the "
                    f"model reads, got {_described(each)}; a transform or a collate function can "
                    "make it"
                )
        return found[0] if len(found) == 1 else tuple(found)

    def _pair(self, batch: Any) -> tuple[Any, Any]:
        keys, target = self._inputs, self._targets
        wanted = [*((keys,) if isinstance(keys, str) else keys or ()), target]
        if isinstance(batch, Mapping):
            if keys is None or any(key not in batch for key in wanted):
                raise DataError(
                    f"{self._name}: batches are mappings with the keys {sorted(map(str, batch))}; "
                    f"inputs and targets must be two of them, got {keys!r} and {target!r}"
                )
            inputs = batch[keys] if isinstance(keys, str) else {key: batch[key] for key in keys}
            return inputs, batch[target]
        if keys is not None or not isinstance(batch, Sequence) or len(batch) != 2:
            raise DataError(
                f"{self._name}: a batch is (inputs, targets), or a mapping whose keys are given by "
                f"inputs= and targets=, got {type(batch).__name__}"
                + (f" of {len(batch)}" if isinstance(batch, Sequence) else "")
                + "; collate= can make it, say inputs, (targets, weights)"
            )
        return batch[0], batch[1]


def _rows_differ(whole: Batch, parts: Sequence[Batch]) -> str:
    """What is not made of the parts' rows, in words; "" where all is.

    Targets may be padded to the longest of a batch.
    """
    for name, place in (("inputs", 0), ("targets", 1)):
        leaves = [tree_leaves(batch[place]) for batch in (whole, *parts)]
        for every, *some in zip(*leaves, strict=False):  # one for each sample is refused for itself
            if isinstance(every, Tensor) and not _is_made_of(every, some):
                return name
    return ""


def _is_made_of(whole: Tensor, parts: Sequence[Tensor]) -> bool:
    if whole.ndim == 0 or any(part.ndim == 0 for part in parts):
        return True  # no rows, which is refused for itself
    if sum(map(len, parts)) != len(whole):
        return False
    rows = whole.split([len(part) for part in parts])
    return all(_is_padded(mine, part) for mine, part in zip(rows, parts, strict=True))


def _is_padded(whole: Tensor, part: Tensor) -> bool:
    """Whether the part is the beginning of a whole that goes on with one constant."""
    if whole.ndim != part.ndim or any(a < b for a, b in zip(whole.shape, part.shape, strict=True)):
        return False
    inside = tuple(slice(size) for size in part.shape)
    rest = torch.ones(whole.shape, dtype=torch.bool, device=whole.device)
    rest[inside] = False
    left = whole[rest]
    both = whole[inside], part
    same = (both[0] == both[1]) | ((both[0] != both[0]) & (both[1] != both[1]))
    return bool(same.all()) and (not left.numel() or bool((left == left[0]).all()))


def _described(value: Any) -> str:
    if isinstance(value, tuple | list):
        return f"{type(value).__name__} of {len(value)}"
    return type(value).__name__
