"""Biases of relative positions, of one table for two attentions, and read elsewhere, too."""

from typing import Any

from tests.oracle.cases import Case, Cut, Run
from tests.oracle.models import Net

_BIASED = (
    "rows, tokens, width = x.shape",
    "b = self.bias(self.apart).permute(2, 0, 1)",
    "q, k, v = self.m1(x).reshape(rows, tokens, 3, 4, 2).permute(2, 0, 3, 1, 4)",
    "y = F.scaled_dot_product_attention(q, k, v, attn_mask=b)",
    "x = x + self.m2(y.transpose(1, 2).flatten(2))",
    "q, k, v = self.m3(x).reshape(rows, tokens, 3, 4, 2).permute(2, 0, 3, 1, 4)",
    "y = (self.scale * (q @ k.transpose(-2, -1)) + b).softmax(-1) @ v",
    "x = x + self.m4(y.transpose(1, 2).flatten(2))",
    "x = self.head(x.mean(1) * b.mean() + self.scale.mean())",
)
BIASED = Net(
    (5, 8),
    (
        "self.m1, self.m2, self.m3, self.m4 = (nn.Linear(8, n) for n in (24, 8, 24, 8))",
        "self.bias, self.scale = nn.Embedding(9, 4), nn.Parameter(torch.rand(4, 1, 1))",
        "at = torch.arange(5)",
        "self.register_buffer('apart', at[:, None] - at + 4)",
        "self.head = nn.Linear(8, 3)",
    ),
    _BIASED,
)


def _by_heads(world: int, *shares: tuple[float, ...] | None, **others: Any) -> Cut:
    """Both attentions by heads, over all ranks; shares of none: whole."""
    pairs = zip((("m1", "m2"), ("m3", "m4")), shares, strict=True)
    cut = [(n, s, one) for names, one in pairs for n, s in zip(names, _PAIR, strict=True) if one]
    return Cut(world, tuple((name, scheme, world, one) for name, scheme, one in cut), **others)


_PAIR = ("shard_out", "shard_in")

RELATIVE = {
    "relative positions, both attentions cut by heads": Case(
        BIASED,
        _by_heads(3, (2, 0, 1), (1, 2, 1)),
        Run(steps=3, accumulate=2, clip=(("clip_norm", 0.5),)),
    ),
    "relative positions, one attention whole, resumed": Case(
        BIASED,
        _by_heads(2, None, (1, 3), rows=(2, 1)),
        Run(steps=3, checkpoint_every=1, optimizer="AdamW(lr=0.01)", shard=True),
        "resumed",
    ),
    "relative positions, re-cut": Case(
        BIASED,
        _by_heads(2, (1, 1), (1, 1)),
        Run(steps=3, optimizer="SGD(lr=0.1, momentum=0.9)"),
        "re-cut",
        _by_heads(2, (1, 3), None),
    ),
    "relative positions, pipelined, in bf16": Case(
        BIASED,
        _by_heads(2, (3, 1), (1, 1)),
        Run(precision="bf16", sync="Pipelined(width=2)"),
    ),
}
