"""An embedding of which a rank has some features, or the rows of some tokens of the vocabulary.

T   tokens       V, V_g   tokens of the vocabulary, and those held here       E   features

    ids      [B, T]       replicated: the group's rows
    table    [V_g, E]     cut by the vocabulary: other tokens give zeros, a summand of the output
             [V, E_g]     cut by features: these features of the output
    output   [B, T, E]    or [B, T, E_g]

    gradient of the table    of the output's rows at the tokens held here, local

Nothing is communicated inside.

Source: Shoeybi et al. 2019 (arXiv:1909.08053, sec. 3) for the cut by the vocabulary; unequal pieces
are ours.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from workbench.layers.local.idle import nothing
from workbench.plan.graph.graph import Layer
from workbench.plan.placement.layer_plan import LayerPlan
from workbench.plan.placement.placement import Shard


class LocalEmbedding(nn.Module):
    """`torch.nn.Embedding`, by the tokens or the features that are held here.

    Args:
        tokens: how the vocabulary is cut over the group; None: every rank has all of it.
    """

    weight: Tensor

    def __init__(
        self, local: nn.Embedding, layer: Layer, tokens: Shard | None, member: int
    ) -> None:
        super().__init__()
        self.__dict__.update(local.__dict__)
        self.name, self.vocabulary = layer.name, layer.num_embeddings
        self.first, self.held = (0, self.vocabulary) if tokens is None else tokens.span(member)
        self.is_cut = tokens is not None
        of_all = local.padding_idx
        here = of_all is not None and self.first <= of_all < self.first + self.held
        self.padding_idx = of_all - self.first if of_all is not None and here else None

    def forward(self, ids: Tensor) -> Tensor:
        """Maps [B, ...] to [B, ..., features].

        Raises:
            IndexError: a token that is not in the vocabulary.
        """
        self._check(ids)
        if not self.is_cut:
            return F.embedding(ids, self.weight, self.padding_idx)
        if not self.held:
            shape = (*ids.shape, self.weight.shape[1])
            return nothing(shape, ids, self.weight, dtype=lambda: self.weight.dtype)
        local = ids - self.first
        elsewhere = (local < 0) | (local >= self.held)
        found = F.embedding(local.masked_fill_(elsewhere, 0), self.weight, self.padding_idx)
        return found.masked_fill_(elsewhere[..., None], 0.0)

    def _check(self, ids: Tensor) -> None:
        if not ids.numel():
            return
        least, most = (int(end) for end in torch.aminmax(ids))
        if least < 0 or most >= self.vocabulary:
            raise IndexError(
                f"layer {self.name!r}: token {least if least < 0 else most} is not in its "
                f"vocabulary, 0 to {self.vocabulary - 1}"
            )

    def extra_repr(self) -> str:
        """Returns what `print(model)` says of it."""
        held = f"tokens {self.first} to {self.first + self.held - 1}" if self.held else "no tokens"
        return f"{held} of {self.vocabulary}, {self.weight.shape[1]} features"


def local_embedding(
    local: nn.Module, layer: Layer, choice: LayerPlan | None, rank: int
) -> nn.Module:
    """Returns the embedding of the tokens or features held here; another module as it is.

    Args:
        local: torch's module, with this rank's piece of the table; or what a scheme made of it.
    """
    if not isinstance(local, nn.Embedding):
        return local
    if choice is None or choice.group_size == 1 or choice.scheme != "shard_in":
        return LocalEmbedding(local, layer, None, 0)
    tokens = Shard(0, choice.division(layer).sizes)
    return LocalEmbedding(local, layer, tokens, rank % choice.group_size)
