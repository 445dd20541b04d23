"""Sums gradients over replica groups, in buckets, while backward goes on."""

import math
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType

import torch
from torch import Tensor, nn

from workbench.comm.algorithms.owned import Owned
from workbench.comm.collectives import Pending, start_all_reduce
from workbench.comm.groups.errors import CodecError
from workbench.comm.groups.group import Group
from workbench.layers.cut_model import CutModel
from workbench.layers.linear import Linear, Spare
from workbench.plan.all_reduce import Algorithm
from workbench.plan.codec import Codec


@dataclass
class Bucket:
    """Gradients that travel together: views of one flat buffer."""

    group: Group
    flat: Tensor
    views: dict[str, Tensor]
    residual: Tensor | None
    """What this rank's encodings of it have left out."""
    owned: Owned | None = None
    """Where each rank sums a segment of it only."""
    waiting: set[str] = field(default_factory=set)
    pending: Pending | None = None

    def poll(self) -> bool:
        """Whether the sum is there."""
        with self.blamed():
            return self.pending is None or self.pending.poll()

    def wait(self) -> None:
        """Returns when the sum is there, if one has been started."""
        with self.blamed():
            if self.pending is not None:
                self.pending.wait()

    @contextmanager
    def blamed(self) -> Iterator[None]:
        """Says of what cannot be encoded in whose gradient it probably arose.

        What the bucket then holds are this rank's gradients, or their sums as far as they got.
        """
        try:
            yield
        except CodecError as error:
            worst = max(self.views, key=lambda name: _peak(self.views[name]))
            said = f"{error}; the largest is in the gradient of {worst!r}"
            raise CodecError(said, worst.rpartition(".")[0]) from error


def _peak(x: Tensor) -> float:
    """The largest magnitude; of what is no number, infinity."""
    return x.abs().nan_to_num(nan=math.inf, posinf=math.inf).max().item() if x.numel() else 0.0


class GradientSum:
    """Makes every gradient the sum over the ranks that hold the same piece.

    A rank's loss is a part of the global mean, so that the sum is the gradient: nothing is
    divided. Buckets are filled in the order in which backward reaches them, and sent strictly
    in that order, the same on all ranks; parameters without replicas are left alone. Of several
    sums of one model, that which has begun last takes what backward leaves.

    Args:
        model: the cut model.
        bucket_bytes: a bucket is closed once it holds this much.
        names: the parameters to look after; None: all.
        algorithm: of the sums.
        codec: what gradients become while they travel; None: they stay as they are.
        owned: the buckets of which each rank sums its own segment only, by their names.
        alone: look after parameters without replicas as well; else these keep their gradients
            themselves.
    """

    def __init__(
        self,
        model: CutModel,
        bucket_bytes: int,
        names: Collection[str] | None = None,
        *,
        algorithm: Algorithm = "auto",
        codec: Codec | None = None,
        owned: Mapping[tuple[str, ...], Owned] = MappingProxyType({}),
        alone: bool = False,
    ) -> None:
        every = model.trainable()
        self.parameters = {n: p for n, p in every.items() if names is None or n in names}
        self._buckets: list[Bucket] = []
        self._home: dict[str, Bucket] = {}
        self._spares = _spares(model)
        self._algorithm: Algorithm = algorithm
        self._codec = codec
        self.keeps_residuals = codec is not None and codec.error_feedback
        self._filling, self._sending = False, False
        self._next = 0
        self._under_way: list[Bucket] = []
        for together, group in bucketed(model, self.parameters, bucket_bytes, alone):
            self._add(together, group, owned.get(tuple(together)))
        self._hooks = [
            self.parameters[name].register_post_accumulate_grad_hook(self._hook(name, bucket))
            for name, bucket in self._home.items()
        ]

    def begin(self) -> None:
        """Forgets the last step's gradients; their memory is for this step's."""
        self._filling, self._sending, self._next, self._under_way = True, False, 0, []
        for name, parameter in self.parameters.items():
            home = self._home.get(name)
            memory = parameter.grad if home is None else home.views[name]
            if parameter in self._spares and memory is not None:
                self._spares[parameter].give(memory)
            parameter.grad = None
        for bucket in self._buckets:
            bucket.waiting = set(bucket.views)
            bucket.pending = None

    def last(self) -> None:
        """The next backward pass is the step's last: gradients may be sent as they come."""
        self._sending = True

    def start(self) -> list[Pending]:
        """Sends what is not on its way yet; returns the sums that are under way.

        Until the next `begin`, gradients that backward leaves are no longer taken.
        """
        for bucket in self._buckets:
            for name in bucket.waiting:
                if self.parameters[name].grad is None:
                    self.parameters[name].grad = bucket.views[name].zero_()
            bucket.waiting = set()
        self._send_ready()
        self._filling = False
        return [bucket.pending for bucket in self._buckets if bucket.pending is not None]

    def wait(self) -> None:
        """Returns when all sums are there."""
        for bucket in self._buckets:
            bucket.wait()

    def finish(self) -> None:
        """Sends what backward did not reach, and waits for all sums."""
        self.start()
        self.wait()

    def close(self) -> None:
        """Lets go of the parameters: their next gradients are not looked after."""
        for hook in self._hooks:
            hook.remove()

    @property
    def views(self) -> dict[str, Tensor]:
        """Where the gradients, and then their sums, lie: those that travel, by name."""
        return {name: view for bucket in self._buckets for name, view in bucket.views.items()}

    @property
    def residuals(self) -> dict[str, Tensor]:
        """The same for what encodings have left out, of parameters with replicas."""
        found = {}
        for bucket in self._buckets:
            if bucket.residual is not None:
                pieces = bucket.residual.split([view.numel() for view in bucket.views.values()])
                for (name, view), piece in zip(bucket.views.items(), pieces, strict=True):
                    found[name] = piece.view_as(view)
        return found

    @property
    def buffers(self) -> list[Tensor]:
        """The flat buffers and residuals, for the account of memory."""
        residuals = [bucket.residual for bucket in self._buckets]
        return [bucket.flat for bucket in self._buckets] + [r for r in residuals if r is not None]

    def _add(self, names: list[str], group: Group, owned: Owned | None) -> None:
        first = self.parameters[names[0]]
        # The same order on all ranks of a group: that in which backward reaches first names.
        numel = sum(self.parameters[name].numel() for name in names)
        flat = group.buffer(numel, first) if owned is None else owned.flat
        views, start = {}, 0
        for name in names:
            parameter = self.parameters[name]
            views[name] = flat[start : start + parameter.numel()].view_as(parameter)
            start += parameter.numel()
        residual = None
        if self.keeps_residuals and group.link is not None:
            residual = torch.zeros_like(flat, device=group.link.device)
        bucket = Bucket(group, flat.detach(), views, residual, owned)
        self._buckets.append(bucket)
        self._home.update(dict.fromkeys(names, bucket))

    def _hook(self, name: str, bucket: Bucket) -> Callable[[Tensor], None]:
        view = bucket.views[name]
        # A strong reference would make a cycle through torch's hooks, which is never collected:
        # the whole model would stay alive after its run.
        owner = weakref.ref(self)

        def gather(parameter: Tensor) -> None:
            gradients = owner()
            if gradients is None or not gradients._filling:
                return
            assert parameter.grad is not None
            if parameter.grad.data_ptr() != view.data_ptr():
                view.copy_(parameter.grad)
            parameter.grad = view  # further micro-batches add in place
            if gradients._sending:
                bucket.waiting.discard(name)
                gradients._send_ready()
                gradients._advance()

        return gather

    def _send_ready(self) -> None:
        while self._next < len(self._buckets) and not self._buckets[self._next].waiting:
            bucket = self._buckets[self._next]
            with bucket.blamed():
                bucket.pending = self._summed(bucket)
            if not bucket.pending.by_itself:
                self._under_way.append(bucket)
            self._next += 1

    def _summed(self, bucket: Bucket) -> Pending:
        if bucket.owned is not None:
            return bucket.owned.start_sum(layer="gradients")
        return start_all_reduce(
            bucket.flat,
            bucket.group,
            algorithm=self._algorithm,
            codec=self._codec if bucket.group.size > 1 else None,
            residual=bucket.residual,
            layer="gradients",
        )

    def _advance(self) -> None:
        """Adds up what has arrived, which no thread does meanwhile."""
        self._under_way = [bucket for bucket in self._under_way if not bucket.poll()]


def _spares(model: CutModel) -> dict[Tensor, Spare]:
    """Where large weights take the memory of their next gradient."""
    return {m.weight: m.spare for m in model.modules() if isinstance(m, Linear)}


def bucketed(
    model: CutModel, parameters: dict[str, nn.Parameter], bucket_bytes: int, alone: bool = False
) -> list[tuple[list[str], Group]]:
    """Names in the order of backward, closed into buckets by replica group and dtype.

    Those that no other rank holds are left out, but for `alone`.
    """
    buckets: list[tuple[list[str], Group]] = []
    opened: dict[tuple[int, torch.dtype], tuple[list[str], int]] = {}
    for name, parameter in reversed(parameters.items()):
        k = model.placements[name].group_size
        group = model.replica_group(k)
        if (group.size == 1 and not alone) or parameter.numel() == 0:
            continue
        names, held = opened.get((k, parameter.dtype), ([], 0))
        if not names:
            buckets.append((names, group))
        names.append(name)
        held += parameter.nbytes
        opened[k, parameter.dtype] = ([], 0) if held >= bucket_bytes else (names, held)
    return buckets
