"""Ways of writing a model that ordinary code has, and that move or hide what a plan looks at."""

from typing import Any

from tests.oracle.cases import Case, Cut, Run
from tests.oracle.models import Net
from tests.oracle.relative import RELATIVE

_HEADS = (
    "rows, tokens, width = x.shape",
    "q, k, v = self.m1(x).reshape(rows, tokens, 3, 2, 4).permute(2, 0, 3, 1, 4)",
    "x = x + F.softmax(q @ k.transpose(-2, -1), -1).matmul(v).transpose(1, 2).flatten(2)",
)

_LANGUAGE = (
    "self.m1 = nn.Embedding(11, 8)",
    "self.m2 = Attention(8, 2, 0.1, True)",
    "self.m3 = nn.Embedding(5, 8)",
    "self.head = nn.Linear(8, 11, bias={bias})",
)
_NEXT_TOKENS = (
    "x = self.m1(x) + self.m3(torch.arange(x.shape[1]))",
    "x = self.head(x + self.m2(x))",
)
TIED = Net(
    (5,),
    (*(line.format(bias=True) for line in _LANGUAGE), "self.head.weight = self.m1.weight"),
    _NEXT_TOKENS,
    vocabulary=11,
)
UNTIED = Net((5,), tuple(x.format(bias=False) for x in _LANGUAGE), _NEXT_TOKENS, vocabulary=11)

_BLOCK = (
    "x = x + self.m5(self.m4(F.gelu(self.m3(self.m2(x)))))",
    "x = x + self.m7(self.m6(x * (x * x).mean(-1, keepdim=True).rsqrt() * self.own))",
)
BLOCKS = Net(
    (5,),
    (
        "self.m1 = nn.Embedding(11, 8)",
        "self.at = nn.Parameter(torch.rand(5, 8))",
        "self.own = nn.Parameter(torch.rand(8))",
        "self.m2, self.m3, self.m4 = nn.LayerNorm(8), nn.Linear(8, 12), nn.Linear(12, 8)",
        "self.m5, self.m6, self.m7 = nn.Dropout(0.2), nn.Linear(8, 8), nn.Linear(8, 8)",
        "self.m8, self.head = nn.RMSNorm(8), nn.Linear(8, 11)",
    ),
    ("x = self.m1(x) + self.at", *_BLOCK, "x = self.head(self.m8(x))"),
    vocabulary=11,
)


def _by_tokens(world: int, tokens: bool | tuple[float, ...], **others: Any) -> Cut:
    """Pairs of column and row, with tokens divided between them."""
    schemes = dict(m1="shard_in", m3="shard_out", m4="shard_in", m6="shard_out", m7="shard_in")
    every = {**schemes, "head": "shard_out"}
    layers = tuple((name, scheme, world, None) for name, scheme in every.items())
    return Cut(world, layers, tokens=tokens, **others)


_SCALED = ("self.m1 = Scaled(11, 8)", "self.head = nn.Linear(8, 11, bias=False)")
_SCALED_TIED = (*_SCALED, "self.head.weight = self.m1.weight")
SCALED = ("x = self.head(torch.tanh(self.m1(x)))",)

_NORMED = (
    "rows, tokens, width = x.shape",
    "q, k, v = self.m1(x).reshape(rows, tokens, 3, 4, 4).permute(2, 0, 3, 1, 4)",
    "x = F.scaled_dot_product_attention(self.m2(q), self.m3(k), v, is_causal=True)",
    "x = self.head(torch.tanh(self.out(x.transpose(1, 2).flatten(2))).mean(1))",
)
NORMED = Net(
    (5, 8),
    (
        "self.m1 = nn.Linear(8, 48)",
        "self.m2, self.m3 = nn.RMSNorm(4), nn.LayerNorm(4)",
        "self.out, self.head = nn.Linear(16, 6), nn.Linear(6, 3)",
    ),
    _NORMED,
)

WRITTEN = {
    **RELATIVE,
    "a tied bias of scores, cut by features, of which a rank has none": Case(
        Net(
            (5,),
            (
                "self.m1, self.head = nn.Embedding(11, 8), nn.Linear(8, 11)",
                "self.head.weight = self.m1.weight",
                "self.bias = self.head.bias",
            ),
            SCALED,
            vocabulary=11,
        ),
        Cut(3, (("m1", "shard_out", 3, (2, 0, 1)),)),
        Run(steps=3, optimizer="AdamW(lr=0.01)"),
    ),
    "norms of heads that are modules": Case(
        NORMED,
        Cut(3, (("m1", "shard_out", 3, (2, 0, 1)), ("out", "shard_in", 3, (2, 0, 1)))),
        Run(steps=3, accumulate=2, clip=(("clip_norm", 0.5),)),
    ),
    "norms of heads that are modules, in two groups, resumed": Case(
        NORMED,
        Cut(4, (("m1", "shard_out", 2, (1, 3)), ("out", "shard_in", 2, (1, 3))), rows=(1, 0, 2, 1)),
        Run(steps=3, checkpoint_every=1, optimizer="AdamW(lr=0.01)", shard=True),
        "resumed",
    ),
    "what is made for evaluations is made anew": Case(
        Net(
            (8,),
            ("self.m1 = nn.Linear(8, 6)", "self.m2 = Caching(6)", "self.head = nn.Linear(6, 3)"),
            ("x = self.head(self.m2(torch.tanh(self.m1(x))))",),
        ),
        Cut(2, (("m1", "shard_out", 2, None), ("head", "shard_in", 2, None))),
        Run(steps=4, evaluate_every=1, optimizer="AdamW(lr=0.1)"),
    ),
    "a scaled table, by its tokens": Case(
        Net((5,), _SCALED, SCALED, vocabulary=11),
        Cut(3, (("m1", "shard_in", 3, (2, 0, 1)), ("head", "shard_out", 3, None))),
        Run(steps=3, accumulate=2),
    ),
    "a scaled table with scores, by its tokens, resumed": Case(
        Net((5,), _SCALED_TIED, SCALED, vocabulary=11),
        Cut(2, (("m1", "shard_in", 2, (2, 1)),)),
        Run(steps=3, checkpoint_every=1, optimizer="AdamW(lr=0.01)"),
        "resumed",
    ),
    "a scaled table with scores, by its features, in bf16": Case(
        Net((5,), _SCALED_TIED, SCALED, vocabulary=11),
        Cut(2, (("m1", "shard_out", 2, None),)),
        Run(precision="bf16"),
    ),
    "divided tokens": Case(BLOCKS, _by_tokens(2, True), Run(accumulate=2, steps=3)),
    "divided tokens, of one rank none, of fewer rows than ranks": Case(
        BLOCKS, _by_tokens(3, (2, 0, 1)), Run(batch_size=2, optimizer="AdamW(lr=0.01)")
    ),
    "divided tokens, recomputed, clipped, sharded": Case(
        BLOCKS,
        _by_tokens(2, (3, 1), recompute=("m2", "m8"), rows=(1, 2)),
        Run(clip=(("clip_norm", 0.5),), shard=True, optimizer="AdamW(lr=0.01)"),
    ),
    "divided tokens, resumed, pipelined": Case(
        BLOCKS,
        _by_tokens(2, True),
        Run(steps=3, checkpoint_every=1, sync="Pipelined(width=2)"),
        "resumed",
    ),
    "divided tokens, from rows to tokens": Case(
        BLOCKS,
        _by_tokens(2, False),
        Run(steps=3, optimizer="SGD(lr=0.1, momentum=0.9)"),
        "re-cut",
        _by_tokens(2, (1, 3)),
    ),
    "divided tokens, in bf16": Case(BLOCKS, _by_tokens(2, True), Run(precision="bf16")),
    "divided tokens, a server": Case(
        BLOCKS, _by_tokens(2, True), Run(sync="ParameterServer(server=1)")
    ),
    "next tokens, the vocabulary cut": Case(
        TIED,
        Cut(3, (("m1", "shard_in", 3, (2, 0, 1)),), rows=(2, 0, 1)),
        Run(batch_size=7, accumulate=2, optimizer="AdamW(lr=0.01)"),
    ),
    "next tokens, the features cut, resumed": Case(
        TIED,
        Cut(2, (("m1", "shard_out", 2, (2, 1)),)),
        Run(steps=3, checkpoint_every=1, optimizer="AdamW(lr=0.01)", shard=True),
        "resumed",
    ),
    "next tokens, from the vocabulary cut to whole": Case(
        TIED,
        Cut(2, (("m1", "shard_in", 2, None),), recompute=("m1", "head")),
        Run(steps=3, optimizer="SGD(lr=0.1, momentum=0.9)"),
        "re-cut",
        Cut(2, (("m1", "shard_in", 2, (3, 1)),), rows=(1, 2)),
    ),
    "next tokens, apart from the table, in rounds": Case(
        UNTIED,
        Cut(3, (("head", "shard_out", 3, (1, 0, 2)),), rounds="B/K"),
        Run(clip=(("clip_norm", 0.5),)),
    ),
    "next tokens, the table and the scores cut apart, in bf16": Case(
        UNTIED,
        Cut(2, (("m1", "shard_out", 2, (1, 2)), ("head", "shard_out", 2, (2, 1)))),
        Run(precision="bf16"),
    ),
    "next tokens, summands of their scores": Case(
        UNTIED,
        Cut(3, (("m1", "shard_in", 3, None), ("head", "shard_in", 3, (0, 1, 1)))),
    ),
    "heads, with the batch in the second dimension for a moment": Case(
        Net(
            (3, 8),
            ("self.m1 = nn.Linear(8, 24)", "self.head = nn.Linear(24, 3)"),
            (*_HEADS, "x = self.head(torch.flatten(x, 1))"),
        ),
        Cut(3, (("m1", "shard_out", 3, (1, 0, 2)),), rows=(2, 0, 1)),
        Run(batch_size=7, accumulate=2),
    ),
    "heads in rounds, recomputed": Case(
        Net(
            (3, 8),
            ("self.m1 = nn.Linear(8, 24)", "self.head = nn.Linear(24, 3)"),
            (*_HEADS, "x = self.head(torch.flatten(x, 1))"),
        ),
        Cut(2, (("head", "shard_out", 2, None),), ("permute", "matmul", "softmax"), rounds="B/K"),
        Run(optimizer="AdamW(lr=0.01)", checkpoint_every=1),
        "resumed",
    ),
    "attention with dropout, causal, and with the batch in the second dimension": Case(
        Net(
            (4, 8),
            ("self.m1 = Attention(8, 2, 0.2, True)", "self.head = nn.Linear(32, 3)"),
            ("x = x + self.m1(x)", "x = self.head(torch.flatten(x, 1))"),
        ),
        Cut(2),
        Run(accumulate=3, steps=3),
    ),
    "attention with dropout, its heads cut in two groups": Case(
        Net(
            (4, 8),
            ("self.m1 = Attention(8, 4, 0.3, True)", "self.head = nn.Linear(32, 3)"),
            ("x = x + self.m1(x)", "x = self.head(torch.flatten(x, 1))"),
        ),
        Cut(4, (("m1.qkv", "shard_out", 2, (1, 3)), ("m1.out", "shard_in", 2, (1, 3)))),
        Run(accumulate=2, steps=3),
        "again",
    ),
    "tokens first, folded into rows, with dropout": Case(
        Net(
            (4, 6),
            ("self.m1 = nn.Linear(6, 6)", "self.head = nn.Linear(6, 3)"),
            (
                "x = self.m1(x).transpose(0, 1)",
                "tokens, rows, width = x.shape",
                "x = torch.tanh(x.reshape(tokens * rows, width)).view(tokens, rows, width)",
                "x = F.dropout(x, 0.3, self.training).cumsum(0)",
                "x = self.head(x.mean(0))",
            ),
        ),
        Cut(3, rows=(2, 0, 1)),
        Run(batch_size=5, accumulate=2, steps=3),
    ),
    "scores of several heads, stacked": Case(
        Net(
            (6,),
            (
                "self.m1 = nn.Linear(6, 3)",
                "self.m2 = nn.Linear(6, 3)",
                "self.m3 = nn.Parameter(torch.rand(2))",
            ),
            (
                "x = torch.stack([self.m1(x), self.m2(x)])",
                "x = (x * self.m3.view(-1, 1, 1)).sum(0)",
            ),
        ),
        Cut(2, (("m1", "shard_out", 2, None),)),
    ),
    "parts that are changed in place, by themselves and together": Case(
        Net(
            (4, 6),
            ("self.m1 = nn.Linear(6, 6)", "self.head = nn.Linear(24, 3)"),
            (
                "x = 2 * self.m1(x)",
                "x[..., 0] *= 2",
                "x[:, 1:3] += x[:, :1]",
                "x[:, -1, 2] = x[:, 0, 1] + x[:, 3, 5]",
                "x = self.head(torch.flatten(x, 1))",
            ),
        ),
        Cut(3, (("m1", "shard_out", 3, (1, 0, 2)),), rows=(2, 0, 1)),
        Run(batch_size=7, accumulate=2),
    ),
    "a part without elements": Case(
        Net(
            (4, 6),
            ("self.m1 = nn.Linear(6, 6)", "self.head = nn.Linear(24, 3)"),
            (
                "first, x = x[:, :0], self.m1(x)",
                "x = torch.cat([first.reshape(x.shape[0], 0, 6) * 2, torch.tanh(x)], 1)",
                "x = self.head(torch.flatten(x, 1))",
            ),
        ),
        Cut(2),
    ),
    "a batch norm with an activation inside": Case(
        Net(
            (3, 6, 6),
            (
                "self.m1 = nn.Conv2d(3, 4, 3)",
                "self.m2 = Activated2d(4, momentum=0.3)",
                "self.head = nn.Linear(64, 3)",
            ),
            ("x = self.m2(self.m1(x))", "x = self.head(torch.flatten(x, 1))"),
        ),
        Cut(3, (("m1", "shard_out", 3, (2, 1, 1)),)),
        Run(batch_size=7),
    ),
    "the same on each rank's own rows, resumed": Case(
        Net(
            (3, 6, 6),
            (
                "self.m1 = nn.Conv2d(3, 4, 3)",
                "self.m2 = Activated2d(4)",
                "self.head = nn.Linear(64, 3)",
            ),
            ("x = self.m2(self.m1(x))", "x = self.head(torch.flatten(x, 1))"),
        ),
        Cut(3, rows=(2, 0, 1), local=True),
        Run(steps=3, checkpoint_every=1),
        "resumed",
    ),
    "the same, frozen": Case(
        Net(
            (3, 6, 6),
            (
                "self.m1 = nn.Conv2d(3, 4, 3)",
                "self.m2 = StaysInEval(frozen(Activated2d(4)))",
                "self.head = nn.Linear(64, 3)",
            ),
            ("x = self.m2(self.m1(x))", "x = self.head(torch.flatten(x, 1))"),
        ),
        Cut(2),
    ),
    "parts that are assigned": Case(
        Net(
            (4, 3),
            ("self.m1 = nn.Linear(3, 3)", "self.head = nn.Linear(12, 3)"),
            (
                "y = torch.zeros(x.shape[0], 4, 3).type_as(x)",
                "y[:, 1:] = self.m1(x)[:, :-1]",
                "y[:, 0] = 0.5",
                "mask = torch.zeros(4, 1).type_as(x)",
                "mask[2] = 1.0",
                "x = self.head(torch.flatten(y * mask + x, 1))",
            ),
        ),
        Cut(3, (("m1", "shard_out", 3, None),), rows=(2, 0, 1)),
    ),
    "lines without gradients": Case(
        Net(
            (6,),
            ("self.m1 = nn.Linear(6, 6)", "self.head = nn.Linear(6, 3)"),
            (
                "with torch.no_grad():",
                "    y = torch.tanh(self.m1(x))",
                "x = self.head(x * y + self.m1(x))",
            ),
        ),
        Cut(2, (("head", "shard_in", 2, None),)),
    ),
    "token ids, embedded, causal, with the head tied to the embedding": Case(
        Net(
            (5,),
            (
                "self.m1 = nn.Embedding(11, 8)",
                "self.m2 = Attention(8, 2, 0.1, True)",
                "self.m3 = nn.Linear(8, 11, bias=False)",
                "self.m3.weight = self.m1.weight",
                "self.head = nn.Linear(11, 3)",
            ),
            (
                "mask = (x != 0).unsqueeze(-1)",
                "y = self.m1(x) + self.m1(torch.arange(x.shape[1]))",
                "y = (y + self.m2(y)) * mask",
                "x = self.head(self.m3(y).mean(1))",
            ),
            vocabulary=11,
        ),
        Cut(3, (("head", "shard_in", 3, (1, 0, 2)),), rows=(2, 0, 1)),
        Run(batch_size=7, accumulate=2),
    ),
    "a module under two names, one of which is never called": Case(
        Net(
            (5,),
            (
                "self.m1 = nn.Embedding(11, 8)",
                "self.m2 = nn.Sequential(self.m1, nn.Flatten())",
                "self.head = nn.Linear(40, 3)",
            ),
            ("x = self.head(self.m2(x))",),
            vocabulary=11,
        ),
        Cut(2),
        Run(steps=3, checkpoint_every=1),
        "resumed",
    ),
    "token ids, the head cut by its outputs, in rounds": Case(
        Net(
            (5,),
            ("self.m1 = nn.Embedding(11, 8)", "self.head = nn.Linear(40, 3)"),
            ("x = self.head(self.m1(x).flatten(1))",),
            vocabulary=11,
        ),
        Cut(2, (("head", "shard_out", 2, (1, 2)),), rounds="B/K"),
        Run(optimizer="AdamW(lr=0.01)", checkpoint_every=1),
        "resumed",
    ),
    "a branch for batches of more than one sample": Case(
        Net(
            (6,),
            ("self.m1 = nn.Parameter(torch.rand(1, 6))", "self.head = nn.Linear(6, 3)"),
            (
                "y = self.m1",
                "if x.shape[0] != y.shape[0]:",
                "    y = y.expand(x.shape[0], -1)",
                "x = self.head(F.relu(x * y))",
            ),
        ),
        Cut(3, rows=(2, 0, 1)),
        Run(batch_size=4),
    ),
    "lines in full precision under bf16": Case(
        Net(
            (6,),
            ("self.m1 = nn.Linear(6, 6)", "self.head = nn.Linear(6, 3)"),
            (
                "with torch.autocast('cpu', enabled=False):",
                "    y = torch.sin(x) @ self.m1.weight.t()",
                "x = self.head(self.m1(x) + y)",
            ),
        ),
        Cut(2, rows=(2, 1)),
        Run(precision="bf16"),
    ),
    "experts that count their rows, in a module of their own": Case(
        Net(
            (8,),
            ("self.m = Experts(8)", "self.head = nn.Linear(8, 3)"),
            ("x = self.head(self.m(x))",),
        ),
        Cut(3, (("head", "shard_in", 3, None),), rows=(2, 0, 1)),
    ),
    "a backward pass of its own, in a module of its own": Case(
        Net(
            (8,),
            ("self.m1 = nn.Linear(8, 6)", "self.m = Straight()", "self.head = nn.Linear(6, 3)"),
            ("x = self.head(self.m(self.m1(x)))",),
        ),
        Cut(2, (("m1", "shard_out", 2, None),)),
    ),
    "torch's encoder, of which a token reads none behind it": Case(
        Net(
            (4, 8),
            (
                "self.m = nn.TransformerEncoder(nn.TransformerEncoderLayer("
                "8, 2, 8, dropout=0.1, batch_first=True), 2)",
                "self.register_buffer('mask', nn.Transformer.generate_square_subsequent_mask(4))",
                "self.head = nn.Linear(32, 3)",
            ),
            (
                "x = self.m(x, mask=self.mask, is_causal=True)",
                "x = self.head(torch.flatten(x, 1))",
            ),
        ),
        Cut(2, (("m.layers.0.self_attn", "shard_heads", 2, None),)),
    ),
    "attention that is called twice, and drops otherwise each time": Case(
        Net(
            (4, 8),
            (
                "self.m = nn.MultiheadAttention(8, 2, dropout=0.3, batch_first=True)",
                "self.head = nn.Linear(32, 3)",
            ),
            (
                "x = x + self.m(x, x, x, need_weights=False)[0]",
                "x = x + self.m(x, x, x, need_weights=False)[0]",
                "x = self.head(torch.flatten(x, 1))",
            ),
        ),
        Cut(2),
    ),
}
