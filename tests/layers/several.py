"""Small nets that read several inputs."""

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from workbench.plan.graph.graph import Input


class Joined(nn.Module):
    """Two vectors, joined behind a layer of their own."""

    INPUTS: ClassVar[dict[str, Input]] = {"image": Input((6,)), "meta": Input((4,))}
    CLASSES = 3

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 8), nn.Linear(4, 8), nn.Linear(16, 3)

    def forward(self, image: Tensor, meta: Tensor) -> Tensor:
        return self.c(torch.cat([F.relu(self.a(image)), F.relu(self.b(meta))], 1))


class Masked(nn.Module):
    """Attention over the tokens of a mask, and a score of every token.

    Args:
        fused: whether the attention is torch's own operation.
    """

    INPUTS: ClassVar[dict[str, Input]] = {
        "mask": Input((5,), "bool"),
        "ids": Input((5,), vocabulary=7),
    }
    CLASSES = 7

    def __init__(self, *, fused: bool) -> None:
        super().__init__()
        self.fused = fused
        self.table, self.qkv = nn.Embedding(7, 8), nn.Linear(8, 24)
        self.out, self.head = nn.Linear(8, 8), nn.Linear(8, 7)

    def forward(self, ids: Tensor, *, mask: Tensor | None = None) -> Tensor:
        x = self.table(ids)
        parts = self.qkv(x).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (2, 4)).transpose(1, 2) for part in parts)
        allowed = None if mask is None else mask[:, None, None, :]
        if self.fused:
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed)
        else:
            scores = q @ k.transpose(-1, -2) / 2
            if allowed is not None:
                scores = scores.masked_fill(~allowed, float("-inf"))
            y = scores.softmax(-1) @ v
        return self.head(x + self.out(y.transpose(1, 2).flatten(2)))


class Fused(Masked):
    """The same in one operation."""

    def __init__(self) -> None:
        super().__init__(fused=True)


class Written(Masked):
    """The same written out."""

    def __init__(self) -> None:
        super().__init__(fused=False)


class Placed(nn.Module):
    """Tokens with the numbers of their positions, and one number for each sample."""

    INPUTS: ClassVar[dict[str, Input]] = {
        "ids": Input((5,), vocabulary=7),
        "positions": Input((5,), vocabulary=9),
        "scale": Input(()),
    }
    CLASSES = 3

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(7, 8), nn.Embedding(9, 8)
        self.norm, self.fc, self.head = nn.LayerNorm(8), nn.Linear(8, 12), nn.Linear(12, 3)

    def forward(self, ids: Tensor, positions: Tensor, scale: Tensor) -> Tensor:
        x = self.norm(self.tokens(ids) + self.places(positions))
        return self.head(F.gelu(self.fc(x)).mean(1) * scale[:, None])


NETS = (Joined, Written, Fused, Placed)
