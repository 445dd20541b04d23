"""The parameter server: gradients go to one rank, which moves the weights and hands them out.

Of the n bytes of parameters that p ranks hold, in every step

    gradients    p - 1 ranks send them all, while backward goes on      (p - 1) n into the server
    update       at the server alone, which alone has its state
    weights      the server sends them to all, all at once              (p - 1) n out of the server

A layer that lies over groups of k ranks has k pieces, each with p / k holders; the server of each
is in the group of ranks that the world's server is in.

Source: PS-Sync, the baseline of Pipe-SGD (arXiv:1811.03619); nothing here is slower than it need
be, so that what it is compared with is not flattered.
"""

from collections.abc import Collection

import torch
from torch import Tensor

from workbench.comm.collectives import broadcast
from workbench.comm.groups.group import Group
from workbench.comm.pending import Pending
from workbench.comm.rooted import start_broadcast, start_reduce
from workbench.layers.cut_model import CutModel
from workbench.plan.experiment import Optimizer, ParameterServer
from workbench.train.strategies.gradients import Bucket, GradientSum
from workbench.train.strategies.optimizer import Updater, entry, state_names, state_tensors
from workbench.train.strategies.synchronous import ImmediateStrategy


class ServingUpdater(Updater):
    """Moves what this rank is the server of, and what nobody else holds.

    Args:
        value: the experiment's optimizer.
        model: this rank's part.
        server: a rank of the world.
    """

    def __init__(self, value: Optimizer, model: CutModel, server: int) -> None:
        self.server = server
        every = model.trainable()
        served = {
            name: parameter
            for name, parameter in every.items()
            if is_root(replicas(model, name), server)
        }
        super().__init__(value, model, served)

    def state(self, wanted: Collection[str]) -> dict[str, Tensor]:
        mine = state_tensors(self.optimizer, self.value, self.held)
        found = {}
        for name, parameter in self.model.trainable().items():
            group = replicas(self.model, name)
            for state in state_names(self.value) if parameter.numel() > 0 else ():
                key = entry(state, name)
                like = parameter.detach() if state != "step" else torch.zeros(())
                held = mine.get(key, like).to(parameter.device)
                told = broadcast(held, root_of(group, self.server), group, layer="optimizer")
                if key in wanted:
                    found[key] = told
        return found


class ServedUpdates(ImmediateStrategy):
    """One process's step at any world size, to rounding.

    Args:
        sync: the value.
        model: this rank's part.
        updater: of what this rank serves.
    """

    def __init__(self, sync: ParameterServer, model: CutModel, updater: Updater) -> None:
        self.updater = updater
        self._sums = _SumsAtServer(sync, model)

    def begin(self) -> None:
        self._sums.begin()

    def last(self) -> None:
        self._sums.last()

    def after_round(self, rows: int, samples: int) -> None:
        """Gradients of all rounds add up."""

    def finish(self, rows: tuple[int, ...]) -> None:
        self._sums.finish()

    def update(self, step: int) -> None:
        self.move()

    def move(self) -> None:
        """Moves the weights at their servers, and on all ranks that hold them as well."""
        self.updater.step()
        self._sums.hand_out()

    def settle(self) -> None:
        """Replicas are always equal."""

    @property
    def buffers(self) -> list[Tensor]:
        return self._sums.buffers


class _SumsAtServer(GradientSum):
    """Gradients that are summed at the server only, and whose memory weights come back in."""

    def __init__(self, sync: ParameterServer, model: CutModel) -> None:
        super().__init__(model, sync.bucket_bytes)
        self._server = sync.server

    @torch.no_grad()
    def hand_out(self) -> None:
        """Copies every parameter from its server to the ranks that hold it as well."""
        under_way = []
        for bucket in self._buckets:
            root = root_of(bucket.group, self._server)
            if is_root(bucket.group, self._server):
                for name, view in bucket.views.items():
                    view.copy_(self.parameters[name])
            under_way.append(start_broadcast(bucket.flat, root, bucket.group, layer="parameters"))
        for bucket, pending in zip(self._buckets, under_way, strict=True):
            pending.wait()
            if not is_root(bucket.group, self._server):
                for name, view in bucket.views.items():
                    self.parameters[name].copy_(view)

    def _summed(self, bucket: Bucket) -> Pending:
        root = root_of(bucket.group, self._server)
        return start_reduce(bucket.flat, root, bucket.group, layer="gradients")


def replicas(model: CutModel, name: str) -> Group:
    """The ranks that hold the same piece of a parameter as this one."""
    return model.replica_group(model.placements[name].group_size)


def root_of(group: Group, server: int) -> int:
    """Which of the ranks that hold the same pieces serves them, as an index of their group.

    The groups of ranks that hold all pieces of a layer are consecutive ranks: it is the one in
    the same such group as the world's server.
    """
    if group.size == 1:
        return 0
    return server // (group.ranks[1] - group.ranks[0])


def is_root(group: Group, server: int) -> bool:
    """Whether this rank serves the pieces that it has in common with its group."""
    return group.rank == root_of(group, server)
