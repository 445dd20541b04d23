"""Schemes of a person's own, for tests; the first ones are right."""

from workbench.plan.placement.placement import Partial, Replicate, Shard
from workbench.plan.placement.schemes import Scheme, held_by

TRANSPOSED = "torch.nn.ConvTranspose2d"


class ConvOut(Scheme):
    """Cuts convolutions that nothing else splits by output channels."""

    def takes(self, layer):
        return layer.target in ("torch.nn.Conv1d", TRANSPOSED)

    def units(self, layer):
        return layer.output_shape[0]

    def layouts(self, layer, division, coming):
        return Replicate(), Shard(1, division.sizes)

    def holds(self, layer, weight, division, read):
        matrix = len(weight.shape) > 1
        return Shard(int(matrix and layer.target == TRANSPOSED), division.sizes)


class Inside(Scheme):
    """Of whole features each rank multiplies its own of two interleaved blocks: a summand."""

    def takes(self, layer):
        if layer.kind != "linear" or layer.transposed:
            return False
        return layer.input_shape[-1] % 2 == 0

    def units(self, layer):
        return layer.input_shape[-1] // 2

    def layouts(self, layer, division, coming):
        return Replicate(), Partial()

    def holds(self, layer, weight, division, read):
        if len(weight.shape) == 1:
            return held_by(division.first, weight.shape[0], division.group_size)
        return Shard(1, division.sizes, blocks=2)

    def local(self, module, layer, division, member):
        from torch import nn

        spans = Shard(1, division.sizes, blocks=2).spans(member)
        own = [index for start, length in spans for index in range(start, start + length)]

        class Multiplied(nn.Module):
            def __init__(self):
                super().__init__()
                for name, parameter in module.named_parameters():
                    self.register_parameter(name, parameter)

            def forward(self, x):
                bias = getattr(self, "bias", None)
                return nn.functional.linear(x[..., own], self.weight, bias)

        return Multiplied()


class ByGroups(Scheme):
    """Cuts a group norm between its groups: it reads and gives its own channels."""

    def takes(self, layer):
        return layer.target == "torch.nn.GroupNorm"

    def units(self, layer):
        return 4

    def layouts(self, layer, division, coming):
        cut = Shard(1, division.sizes).scaled(layer.input_shape[0] // 4)
        return cut, cut

    def holds(self, layer, weight, division, read):
        return Shard(0, read.sizes)


class Unsummed(ConvOut):
    """Wrong: each rank's gradient of the input is taken for the whole one."""

    summed_back = False


class OtherSlice(Inside):
    """Wrong: each rank holds consecutive columns, and multiplies interleaved features."""

    def holds(self, layer, weight, division, read):
        if len(weight.shape) == 1:
            return super().holds(layer, weight, division, read)
        return Shard(1, tuple(2 * size for size in division.sizes))


class Twice(Inside):
    """Wrong: a summand is given for the whole output."""

    def layouts(self, layer, division, coming):
        return Replicate(), Replicate()

    def holds(self, layer, weight, division, read):
        placed = super().holds(layer, weight, division, read)
        return placed if len(weight.shape) > 1 else Replicate()
