"""The gradients of weights, from the backward pass that makes them to the step's end.

    in a bucket                   a part of its flat buffer, which stays; made beside it and
                                  copied in, but for large linear layers' first of a step
    in none, large linear layer   written where the last step's was: it stays
    in none                       made in the backward pass, gone when the next step begins

A further gradient of the same step is made beside the first and added to it.

Source: `torch.autograd`'s AccumulateGrad; the workbench's GradientSum and Linear.
"""

from collections.abc import Mapping

import numpy as np

from workbench.plan.experiment import LocalSGD
from workbench.plan.graph import Layer
from workbench.predict.memory.reduction_buffers import ReductionBuffers
from workbench.predict.memory.timeline import Timeline
from workbench.program.operations import HALF
from workbench.program.parameters import KEEPS_GRADIENT_BYTES
from workbench.program.rows import Counts
from workbench.program.step import Program


class Gradients:
    """Writes what becomes of weights' gradients.

    Args:
        program: says which gradients are in buckets.
        timeline: to write on.
        arriving: are free again when the next gradient is there.
    """

    def __init__(self, program: Program, timeline: Timeline, arriving: ReductionBuffers) -> None:
        experiment, plan, pieces = program.experiment, program.plan, program.pieces
        self.timeline = timeline
        self.half = experiment.precision == "bf16"
        self.sizes = {name: pieces.sizes[name] for name in pieces.names}
        sums = not isinstance(experiment.sync, LocalSGD)
        self.in_bucket = program.buckets.names
        rewritten = (
            layer.weights[0].name
            for layer in plan.graph.layers
            if sums and not self.half and layer.kind == "linear" and layer.weights
        )
        self.rewrites = {
            name: self.sizes[name] >= KEEPS_GRADIENT_BYTES
            for name in rewritten
            if name in self.sizes
        }
        self._there: dict[str, int | None] = {}
        self._pieces, self.arriving = pieces, arriving

    def resident(self) -> dict[str, Counts]:
        """Bytes that stay from step to step, for each layer that has some."""
        stays = {}
        for name, size in self.sizes.items():
            if name in self.in_bucket:
                stays[name] = size
            elif name in self.rewrites:
                stays[name] = size * self.rewrites[name]
        return self._pieces.by_layer(stays)

    def left_by_last_step(self) -> None:
        """Makes the gradients that are forgotten only when the next step begins."""
        for name, size in self.sizes.items():
            if name not in self.in_bucket:
                left = np.where(self.rewrites.get(name, False), 0, size)
                self._there[name] = self.timeline.make(left, "gradients", self._pieces.owners[name])

    def begin(self, names: set[str] | None = None) -> None:
        """The gradients of these parameters, or all, are forgotten."""
        for name in [n for n in self._there if names is None or n in names]:
            tensor = self._there.pop(name)
            if tensor is not None:
                self.timeline.drop(tensor)

    def made(self, layer: Layer) -> dict[str, int]:
        """The gradients that the backward pass of `layer` makes, by the weight's name."""
        return {w.name: self._made(w.name, layer.name) for w in layer.weights if w.trainable}

    def settle(self, layer: Layer, made: Mapping[str, int], *, copied: bool) -> None:
        """Autograd takes what `made` has made.

        Args:
            layer: whose.
            made: its gradients.
            copied: whether each is copied first.
        """
        for name, tensor in made.items():
            if copied:
                self.timeline.pass_by(self.sizes[name], "workspace", layer.name)
            if name in self._there or name in self.in_bucket:
                self.timeline.drop(tensor)
                self._there.setdefault(name, None)
            else:
                self._there[name] = tensor
        if made:
            self.arriving.finish()

    def _made(self, name: str, layer: str) -> int:
        size = self.sizes[name]
        if name in self.rewrites and name not in self._there:
            size = np.where(self.rewrites[name], 0, size)
        if self.half:  # made in half precision, then cast
            self.timeline.pass_by(size // 4 * HALF, "workspace", layer)
        return self.timeline.make(size, "gradients", layer)
