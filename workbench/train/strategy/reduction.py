"""Sums gradients over replica groups, in buckets, while backward goes on.

Which buckets there are, how each is summed and behind which instruction it may begin says the
program of a step. A bucket begins when autograd has left the last of its gradients.
"""

import math
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType

import torch
from torch import Tensor

from workbench.comm.all_reduce import start_all_reduce
from workbench.comm.groups.group import Group
from workbench.comm.messages.errors import CodecError
from workbench.comm.nonblocking import start_broadcast, start_reduce
from workbench.comm.owned import Owned
from workbench.comm.pending import Pending
from workbench.layers.cut_model import CutModel
from workbench.layers.local.faster import Linear, Spare, Transposed
from workbench.plan.experiment.experiment import ParameterServer
from workbench.program.buckets import Bucket
from workbench.program.instructions import Reduce
from workbench.program.step import RankProgram
from workbench.train.optimizer.optimizer import is_root, root_of
from workbench.train.step.state import OutOfOrder, StepFunction, StepState


@dataclass
class GradientBucket:
    """Gradients that travel together: views of one flat buffer."""

    group: Group
    reduce: Reduce
    """How the program says that it is summed."""
    flat: Tensor
    views: dict[str, Tensor]
    residual: Tensor | None
    """What this rank's encodings of it have left out."""
    owned: Owned | None = None
    """Where each rank sums a segment of it only."""
    waiting: set[str] = field(default_factory=set)
    pending: Pending | None = None

    def poll(self) -> bool:
        with self.blamed():
            return self.pending is None or self.pending.poll()

    def wait(self) -> None:
        """Returns when the sum is there, if one has been started."""
        with self.blamed():
            if self.pending is not None:
                self.pending.wait()
                self.pending = None

    @contextmanager
    def blamed(self) -> Iterator[None]:
        """Says of what cannot be encoded in whose gradient it probably arose.

        What the bucket then holds are this rank's gradients, or their sums as far as they got.

        Raises:
            CodecError: what was done raised one; it now names the parameter.
        """
        try:
            yield
        except CodecError as error:
            worst = max(self.views, key=lambda name: _peak(self.views[name]))
            said = f"{error}; the largest is in the gradient of {worst!r}"
            raise CodecError(said, worst.rpartition(".")[0]) from error

    def __str__(self) -> str:
        first, *others = self.views
        return f"the sum of {first!r}" + (f" and {len(others)} more" if others else "")


def has_error_feedback(program: RankProgram) -> bool:
    """Whether what encodings leave out of gradients is added to later ones."""
    reduces = (each for each in program.program.instructions if isinstance(each, Reduce))
    return any(each.codec is not None and each.codec.error_feedback for each in reduces)


def _peak(x: Tensor) -> float:
    """The largest magnitude; of what is no number, infinity."""
    return x.abs().nan_to_num(nan=math.inf, posinf=math.inf).max().item() if x.numel() else 0.0


class GradientSum:
    """Makes every gradient the sum over the ranks that hold the same piece.

    A rank's loss is a part of the global mean, so that the sum is the gradient: nothing is
    divided. Buckets are sent strictly in the order of the program, the same on all ranks;
    parameters without a bucket are left alone. Of several sums of one model, that which has begun
    last takes what backward leaves.

    Args:
        owned: the buckets of which each rank sums its own segment only, by their names.

    Attributes:
        takes_gradients: whether backward passes leave their gradients here.
    """

    def __init__(
        self,
        program: RankProgram,
        model: CutModel,
        owned: Mapping[tuple[str, ...], Owned] = MappingProxyType({}),
    ) -> None:
        self.parameters = model.trainable()
        self.takes_gradients = False
        sync = program.program.experiment.sync
        self._server = sync.server if isinstance(sync, ParameterServer) else 0
        self._spares = _spares(model)
        reduces = [one for one in program.program.instructions if isinstance(one, Reduce)]
        self.keeps_residuals = has_error_feedback(program)
        parts = [(program.part_of(one), one) for one in reduces]
        by_names = {part[0].names: one for part, one in parts if part is not None}
        self._buckets: dict[tuple[str, ...], GradientBucket] = {}
        self._home: dict[str, GradientBucket] = {}
        for bucket in program.buckets:
            group = model.replica_group(bucket.group_size)
            self._add(bucket.names, group, by_names[bucket.names], owned.get(bucket.names))
        self._queue: deque[GradientBucket] = deque()  # that may begin, in order
        self._final: Collection[str] = ()  # whose last gradient the next backward pass leaves
        self._under_way: list[GradientBucket] = []
        self._hooks = [
            self.parameters[name].register_post_accumulate_grad_hook(self._hook(name, bucket))
            for name, bucket in self._home.items()
        ]

    def zeroing(self, names: Sequence[str]) -> StepFunction:
        """What forgets the gradients of these parameters; their memory is for the next ones."""
        parameters = [(name, self.parameters[name]) for name in names]
        buckets = [bucket for bucket in self._buckets.values() if bucket.views.keys() & set(names)]

        def zero_grad(_: StepState) -> None:
            self.takes_gradients = True
            self._final = ()
            self._queue.clear()
            self._under_way = []
            for name, parameter in parameters:
                home = self._home.get(name)
                memory = parameter.grad if home is None else home.views[name]
                if parameter in self._spares and memory is not None:
                    self._spares[parameter].give(memory)
                parameter.grad = None
            for bucket in buckets:
                bucket.waiting = set(bucket.views)
                bucket.pending = None

        return zero_grad

    def expecting(self, names: Collection[str], buckets: Sequence[Bucket]) -> StepFunction | None:
        """What says of the next backward pass which sums may begin in it; None: there are none."""
        if not names and not buckets:
            return None
        final, own = frozenset(names), [self._buckets[bucket.names] for bucket in buckets]

        def expect(_: StepState) -> None:
            self._final = final
            self._queue.extend(own)

        return expect

    def start(self, buckets: Sequence[Bucket] | None = None) -> list[Pending]:
        """Begins what should have begun, and these buckets; returns what is under way.

        What backward has not reached is zero.

        Args:
            buckets: the buckets; None: all.
        """
        own = (
            self._buckets.values() if buckets is None else [self._buckets[b.names] for b in buckets]
        )
        for bucket in (*self._queue, *own):
            for name in bucket.waiting:
                if self.parameters[name].grad is None:
                    self.parameters[name].grad = bucket.views[name].zero_()
            bucket.waiting = set()
            self._send(bucket)
        self._queue.clear()
        every = self._buckets.values()
        return [bucket.pending for bucket in every if bucket.pending is not None]

    def wait(self) -> None:
        """Returns when all sums are there that have begun, or should have."""
        if self._queue:
            self.start(())
        for bucket in self._buckets.values():
            bucket.wait()

    @torch.no_grad()
    def hold(self, gradients: Mapping[str, Tensor]) -> None:
        """Takes sums that were computed before, one for each parameter, as if they were its own."""
        self.takes_gradients = True
        for name, parameter in self.parameters.items():
            home = self._home.get(name)
            parameter.grad = gradients[name] if home is None else home.views[name]
            if home is not None:
                home.views[name].copy_(gradients[name])

    @torch.no_grad()
    def go_on(self) -> None:
        """Gradients are added to sums: on one of the ranks that have them, on others to nothing."""
        for bucket in self._buckets.values():
            bucket.waiting, bucket.pending = set(bucket.views), None
            if bucket.group.rank > 0:
                bucket.flat.zero_()

    @torch.no_grad()
    def hand_out(self, server: int) -> None:
        """Copies every parameter from its server to the ranks that hold it as well.

        Weights travel in the memory of their gradients.
        """
        under_way = []
        for bucket in self._buckets.values():
            root = root_of(bucket.group, server)
            if is_root(bucket.group, server):
                for name, view in bucket.views.items():
                    view.copy_(self.parameters[name])
            under_way.append(start_broadcast(bucket.flat, root, bucket.group, layer="parameters"))
        for bucket, pending in zip(self._buckets.values(), under_way, strict=True):
            pending.wait()
            if not is_root(bucket.group, server):
                for name, view in bucket.views.items():
                    self.parameters[name].copy_(view)

    def close(self) -> None:
        """Lets go of the parameters: their next gradients are not looked after."""
        for hook in self._hooks:
            hook.remove()

    @property
    def views(self) -> dict[str, Tensor]:
        """Where the gradients, and then their sums, lie: those that travel, by name."""
        every = self._buckets.values()
        return {name: view for bucket in every for name, view in bucket.views.items()}

    @property
    def residuals(self) -> dict[str, Tensor]:
        """The same for what encodings have left out, of parameters with replicas."""
        found = {}
        for bucket in self._buckets.values():
            if bucket.residual is not None:
                pieces = bucket.residual.split([view.numel() for view in bucket.views.values()])
                for (name, view), piece in zip(bucket.views.items(), pieces, strict=True):
                    found[name] = piece.view_as(view)
        return found

    @property
    def buffers(self) -> list[Tensor]:
        """The flat buffers and residuals, for the account of memory."""
        every = self._buckets.values()
        residuals = [bucket.residual for bucket in every]
        return [bucket.flat for bucket in every] + [r for r in residuals if r is not None]

    def _add(
        self, names: tuple[str, ...], group: Group, reduce: Reduce, owned: Owned | None
    ) -> None:
        first = self.parameters[names[0]]
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
        bucket = GradientBucket(group, reduce, flat.detach(), views, residual, owned)
        self._buckets[names] = bucket
        self._home.update(dict.fromkeys(names, bucket))

    def _hook(self, name: str, bucket: GradientBucket) -> Callable[[Tensor], None]:
        view = bucket.views[name]
        # A strong reference would make a cycle through torch's hooks, which is never collected:
        # the whole model would stay alive after its run.
        owner = weakref.ref(self)

        def gather(parameter: Tensor) -> None:
            gradients = owner()
            if gradients is None or not gradients.takes_gradients:
                return
            assert parameter.grad is not None
            if bucket.pending is not None:
                raise OutOfOrder(
                    f"a backward pass left a gradient of {name!r} when {bucket} was under way, "
                    "which the program of the step lists behind the last one"
                )
            if parameter.grad.data_ptr() != view.data_ptr():
                view.copy_(parameter.grad)
            parameter.grad = view  # further micro-batches add in place
            if name in gradients._final:
                bucket.waiting.discard(name)
                gradients._send_ready()
            gradients._advance()

        return gather

    def _send_ready(self) -> None:
        while self._queue and not self._queue[0].waiting:
            self._send(self._queue.popleft())

    def _send(self, bucket: GradientBucket) -> None:
        with bucket.blamed():
            bucket.pending = self._summed(bucket)
        if not bucket.pending.by_itself:
            self._under_way.append(bucket)

    def _summed(self, bucket: GradientBucket) -> Pending:
        match bucket.reduce:
            case Reduce(to="server"):
                root = root_of(bucket.group, self._server)
                return start_reduce(bucket.flat, root, bucket.group, layer="gradients")
            case Reduce(to="owners"):
                assert bucket.owned is not None
                return bucket.owned.start_sum(layer="gradients")
            case Reduce(algorithm=algorithm, codec=codec):
                return start_all_reduce(
                    bucket.flat,
                    bucket.group,
                    algorithm=algorithm,
                    codec=codec if bucket.group.size > 1 else None,
                    residual=bucket.residual,
                    layer="gradients",
                )

    def _advance(self) -> None:
        """Adds up what has arrived, which no thread does meanwhile."""
        if self._under_way:
            self._under_way = [bucket for bucket in self._under_way if not bucket.poll()]


def _spares(model: CutModel) -> dict[Tensor, Spare]:
    """Where large weights take the memory of their next gradient."""
    return {m.weight: m.spare for m in model.modules() if isinstance(m, Linear | Transposed)}
