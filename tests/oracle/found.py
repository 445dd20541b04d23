"""Cases that were once wrong, and equal one process now."""

from tests.oracle.cases import Case, Cut, Run
from tests.oracle.models import Net

_OF_BATCH = Net(
    (3, 6, 6),
    ("self.m = nn.BatchNorm2d(3, track_running_stats=False)", "self.head = nn.Linear(108, 3)"),
    ("x = self.head(torch.flatten(self.m(x), 1))",),
)

EQUAL = {
    "a part that is changed in place, and the whole is read": Case(
        Net(
            (8,),
            ("self.m1 = nn.Linear(8, 6)", "self.head = nn.Linear(7, 3)"),
            (
                "x = 1.5 * self.m1(x)",
                "m = x[:, :1]",
                "m += 1",
                "x = self.head(torch.cat([x, m], 1))",
            ),
        ),
        Cut(2, (("m1", "shard_out", 2, None), ("head", "shard_in", 2, (2, 1)))),
        Run(steps=3, optimizer="AdamW(lr=0.01)"),
    ),
    "a buffer that is not saved": Case(
        Net(
            (6,),
            (
                "self.register_buffer('m1', torch.rand(6), persistent=False)",
                "self.head = nn.Linear(6, 3)",
            ),
            ("x = x + self.m1", "x = self.head(x)"),
        )
    ),
    "a parameter that nothing reaches": Case(
        Net(
            (8,),
            ("self.m3 = nn.Linear(3, 3)", "self.head = nn.Linear(8, 3)"),
            ("if x.ndim == 17:", "    x = self.m3(x)", "x = self.head(x)"),
        ),
        Cut(2),
        Run(optimizer="AdamW(lr=0.01, weight_decay=0.2)"),
    ),
    "a parameter that nothing reaches, late": Case(
        Net(
            (4, 8),
            ("self.m4 = nn.Linear(3, 3)", "self.head = nn.Linear(32, 3)"),
            ("if x.ndim == 17:", "    x = self.m4(x)", "x = self.head(torch.flatten(x, 1))"),
        ),
        run=Run(
            optimizer="SGD(lr=0.05, momentum=0.5, weight_decay=0.1)", sync="Pipelined(width=2)"
        ),
    ),
    "only while it trains": Case(
        Net(
            (2, 4, 4, 4),
            ("self.head = nn.Linear(128, 3)",),
            ("if self.training:", "    x = x * 2", "x = self.head(torch.flatten(x, 1))"),
        )
    ),
    "otherwise in evaluation": Case(
        Net(
            (8,),
            ("self.head = nn.Linear(8, 3)",),
            ("m1 = x", "x = x / 2", "x = x if self.training else m1", "x = self.head(x)"),
        )
    ),
    "recomputed, and otherwise in evaluation": Case(
        Net(
            (4,),
            ("self.head = nn.Linear(4, 3)",),
            ("m5 = x", "x = x + x", "x = x if self.training else m5", "x = self.head(x)"),
        ),
        Cut(1, recompute=("add",)),
    ),
    "dropout that is off": Case(
        Net(
            (3, 4),
            ("self.head = nn.Linear(12, 3)",),
            ("x = F.dropout(x, 0.4, training=False)", "x = self.head(torch.flatten(x, 1))"),
        )
    ),
    "dropout of functions, of channels, of attention": Case(
        Net(
            (4, 8),
            (
                "self.m3 = nn.MultiheadAttention(8, 2, dropout=0.2, batch_first=True)",
                "self.register_buffer('mask', nn.Transformer.generate_square_subsequent_mask(4))",
                "self.m4 = nn.Dropout1d(0.3)",
                "self.m5 = nn.TransformerEncoderLayer(8, 2, 8, dropout=0.1, batch_first=True)",
                "self.head = nn.Linear(32, 3)",
            ),
            (
                "x = x + self.m3(x, x, x, attn_mask=self.mask, need_weights=False)[0]",
                "x = F.alpha_dropout(self.m4(x), 0.2, self.training)",
                "x = self.head(torch.flatten(self.m5(x), 1))",
            ),
        ),
        Cut(3, rows=(2, 0, 1)),
        Run(accumulate=2, steps=3, checkpoint_every=1),
        "resumed",
    ),
    "a random slope": Case(
        Net(
            (4, 8),
            ("self.m1 = nn.RReLU()", "self.head = nn.Linear(32, 3)"),
            (
                "x = F.rrelu(self.m1(x), training=self.training)",
                "x = self.head(torch.flatten(x, 1))",
            ),
        ),
        Cut(2),
    ),
    "unequal shares, and otherwise in evaluation": Case(
        Net(
            (8,),
            ("self.m5 = nn.Linear(8, 16)", "self.head = nn.Linear(8, 3)"),
            (
                "x = F.glu(self.m5(x), -1)",
                "if self.training:",
                "    x = x * 2",
                "x = self.head(x)",
            ),
        ),
        Cut(3, (("m5", "shard_out", 3, (3, 0, 0)), ("head", "shard_in", 3, (0, 2, 1)))),
    ),
    "noise that is recomputed": Case(
        Net(
            (8,),
            ("self.m1 = nn.Linear(8, 8)", "self.m2 = Noise(0.1)", "self.head = nn.Linear(8, 3)"),
            ("x = self.m2(self.m1(x))", "x = F.dropout(x, 0.3, self.training)", "x = self.head(x)"),
        ),
        Cut(2, recompute=("m1", "randn_like", "mul", "add", "dropout")),
    ),
    "attention on folded rows, with dropout": Case(
        Net(
            (4, 8),
            (
                "self.m1 = nn.MultiheadAttention(8, 2, dropout=0.2, batch_first=True)",
                "self.head = nn.Linear(32, 3)",
            ),
            (
                "x = x.reshape(-1, 2, 8)",
                "x = self.m1(x, x, x, need_weights=False)[0]",
                "x = self.head(x.reshape(-1, 32))",
            ),
        ),
        Cut(2, (("m1", "shard_heads", 2, None),)),
    ),
    "a frozen batch norm": Case(
        Net(
            (6,),
            ("self.m5 = frozen(nn.BatchNorm1d(6))", "self.head = nn.Linear(6, 3)"),
            ("x = self.head(self.m5(x))",),
        ),
        Cut(2),
    ),
    "a batch norm with a frozen weight": Case(
        Net(
            (1, 6, 6),
            (
                "self.m3 = nn.Conv2d(1, 6, 3, padding=1)",
                "self.m4 = frozen(nn.BatchNorm2d(6), 'weight')",
                "self.head = nn.Linear(216, 3)",
            ),
            ("x = self.head(torch.flatten(self.m4(self.m3(x)), 1))",),
        ),
        Cut(2, local=True),
    ),
    "a frozen weight, a trained bias, no gradient of the input": Case(
        Net(
            (8,),
            ("self.m1 = frozen(nn.Linear(8, 6), 'weight')", "self.head = nn.Linear(6, 3)"),
            ("x = self.head(torch.tanh(self.m1(x)))",),
        ),
        Cut(2, (("m1", "shard_in", 2, None),)),
    ),
    "a batch norm that is kept in evaluation": Case(
        Net(
            (8,),
            ("self.m1 = StaysInEval(nn.BatchNorm1d(8))", "self.head = nn.Linear(8, 3)"),
            ("x = self.head(self.m1(x))",),
        ),
        Cut(2, local=True),
    ),
    "a cumulative batch norm": Case(
        Net(
            (8,),
            ("self.m1 = nn.BatchNorm1d(8, momentum=None)", "self.head = nn.Linear(8, 3)"),
            ("x = self.head(self.m1(x))",),
        ),
        Cut(2, rows=(3, 2), local=True),
        Run(steps=3, batch_size=10, samples=20, checkpoint_every=1),
        "resumed",
    ),
    "local batch norm on ranks without rows": Case(
        Net(
            (3, 6, 6),
            ("self.m1 = nn.BatchNorm2d(3)", "self.head = nn.Linear(108, 3)"),
            ("x = self.head(torch.flatten(self.m1(x), 1))",),
        ),
        Cut(3, rows=(1, 0, 0), local=True),
        Run(steps=3),
    ),
    "a batch norm without statistics of its own": Case(
        Net(
            (2, 8, 8),
            (
                "self.m3 = nn.BatchNorm2d(2, track_running_stats=False)",
                "self.head = nn.Linear(128, 3)",
            ),
            ("x = self.head(torch.flatten(self.m3(x), 1))",),
        ),
        Cut(2, local=True),
    ),
    "a batch norm whose statistics stand still": Case(
        Net(
            (2, 8, 8),
            ("self.m3 = still(nn.BatchNorm2d(2))", "self.head = nn.Linear(128, 3)"),
            ("x = self.head(torch.flatten(self.m3(x), 1))",),
        ),
        Cut(2, local=True),
        Run(steps=3),
    ),
    "synchronized batch norm whose statistics stand still": Case(
        Net(
            (2, 8, 8),
            ("self.m3 = still(nn.BatchNorm2d(2))", "self.head = nn.Linear(128, 3)"),
            ("x = self.head(torch.flatten(self.m3(x), 1))",),
        ),
        Cut(2, local=False),
        Run(steps=3),
    ),
    "a batch norm whose statistics are gone": Case(
        Net(
            (2, 8, 8),
            ("self.m3 = still(nn.BatchNorm2d(2), gone=True)", "self.head = nn.Linear(128, 3)"),
            ("x = self.head(torch.flatten(self.m3(x), 1))",),
        ),
        Cut(2, local=True),
        Run(steps=3),
    ),
    "batches are counted, but no statistics kept": Case(
        Net(
            (2, 8, 8),
            (
                "self.m3 = nn.BatchNorm2d(2)",
                "self.m3.running_mean = self.m3.running_var = None",
                "self.head = nn.Linear(128, 3)",
            ),
            ("x = self.head(torch.flatten(self.m3(x), 1))",),
        ),
        Cut(2, local=True),
        Run(steps=3),
    ),
    "evaluated between steps, with what only trains": Case(
        Net(
            (3, 4),
            ("self.drop = nn.Dropout(0.5)", "self.head = nn.Linear(12, 3)"),
            ("x = self.head(self.drop(torch.flatten(x, 1)))",),
        ),
        Cut(2),
        Run(steps=3, evaluate_every=1),
    ),
    "evaluated between steps, with a layer that is cut": Case(
        Net(
            (3, 4),
            ("self.head = nn.Linear(12, 3)",),
            ("x = self.head(torch.flatten(x, 1))",),
        ),
        Cut(3, (("head", "shard_in", 3, None),)),
        Run(batch_size=13, evaluate_every=1),
    ),
    "a function with an argument `out`": Case(
        Net(
            (6,),
            ("self.head = nn.Linear(6, 3)",),
            ("x = F.normalize(x, dim=1)", "x = self.head(x)"),
        )
    ),
    "bf16 on a rank without rows": Case(
        Net(
            (3, 6, 6),
            (
                "self.m1 = nn.Conv2d(3, 4, 3, padding=1)",
                "self.m2 = nn.Linear(144, 8)",
                "self.head = nn.Linear(8, 3)",
            ),
            ("x = self.m2(torch.flatten(F.relu(self.m1(x)), 1))", "x = self.head(F.relu(x))"),
        ),
        Cut(2, (("m2", "shard_out", 2, None), ("head", "shard_in", 2, None)), rows=(1, 0)),
        Run(precision="bf16"),
    ),
    "masked attention, whose mask is infinite": Case(
        Net(
            (2, 9),
            (
                "self.m3 = nn.MultiheadAttention(9, 1, bias=False, batch_first=True)",
                "self.register_buffer('mask', nn.Transformer.generate_square_subsequent_mask(2))",
                "self.head = nn.Linear(18, 3)",
            ),
            (
                "x = x + self.m3(x, x, x, attn_mask=self.mask, need_weights=False)[0]",
                "x = self.head(torch.flatten(x, 1))",
            ),
        )
    ),
    "rows that are repeated": Case(
        Net(
            (8,),
            ("self.m1 = nn.Linear(8, 4)", "self.head = nn.Linear(8, 3)"),
            ("x = self.m1(x.repeat_interleave(2, 0)).reshape(-1, 8)", "x = self.head(x)"),
        ),
        Cut(2),
    ),
    "in place, on what a recomputed layer gives": Case(
        Net(
            (8,),
            ("self.m = nn.Linear(8, 8)", "self.head = nn.Linear(8, 3)"),
            (
                "x = self.m(x) * 1.5",
                "x = x.view(-1, 2, 4)",
                "x.relu_()",
                "x = self.head(x.flatten(1))",
            ),
        ),
        Cut(2, recompute=("mul",)),
    ),
    "in place, on what a recomputed layer has read": Case(
        Net(
            (8,),
            ("self.m = nn.Linear(8, 8)", "self.head = nn.Linear(8, 3)"),
            (
                "x = self.m(x) * 1.5",
                "y = torch.cos(x + 1.0)",
                "x.add_(1.0)",
                "x = self.head(x + y)",
            ),
        ),
        Cut(2, recompute=("add", "cos")),
    ),
    "in place, on what evaluation does not look at": Case(
        Net(
            (8,),
            ("self.m = nn.Linear(8, 8)", "self.head = nn.Linear(8, 3)"),
            (
                "m1 = x",
                "x = self.m(x)",
                "x.relu_()",
                "x = x if self.training else m1",
                "x = self.head(x)",
            ),
        )
    ),
    "a cumulative batch norm before a rank with nothing of a layer": Case(
        Net(
            (8,),
            ("self.m = nn.BatchNorm1d(8, momentum=None)", "self.head = nn.Linear(8, 3)"),
            ("x = self.head(self.m(x))",),
        ),
        Cut(4, (("head", "shard_in", 4, (1, 1, 1, 0)),)),
        Run(batch_size=12),
    ),
    "noise on a rank without rows": Case(
        Net((8,), ("self.head = nn.Linear(8, 3)",), ("x = self.head(x + torch.rand_like(x))",)),
        Cut(2, rows=(0, 1)),
    ),
    "in place, in bf16 on what is bf16": Case(
        Net(
            (12,),
            ("self.m = nn.Linear(12, 12)", "self.head = nn.Linear(12, 3)"),
            ("y = x", "x = self.m(x)", "x += y", "x = self.head(x.add(0.5).mul_(y))"),
        ),
        Cut(1),
        Run(batch_size=10, samples=20, precision="bf16"),
    ),
    "one row that lies unusually, in batch norm": Case(
        Net(
            (2, 8, 8),
            (
                "self.m = StaysInEval(nn.BatchNorm2d(2))",
                "self.i = nn.InstanceNorm2d(2, affine=True)",
                "self.head = nn.Linear(128, 3)",
            ),
            (
                "x = self.m(x) + self.i(x.square())",
                "x = self.head(torch.flatten(x.flatten(2).transpose(1, 2), 1))",
            ),
        ),
        Cut(2),
        Run(batch_size=6, accumulate=3),
    ),
    "one row that lies unusually, in a function": Case(
        Net(
            (2, 8, 8),
            ("self.m = nn.Conv2d(2, 2, 1)", "self.head = nn.Linear(128, 3)"),
            (
                "x = F.instance_norm(self.m(x))",
                "x = self.head(torch.flatten(x.flatten(2).transpose(1, 2), 1))",
            ),
        ),
        Cut(2),
        Run(batch_size=6, accumulate=3),
    ),
    "tied weights, re-cut": Case(
        Net(
            (6,),
            (
                "self.m2 = nn.Linear(6, 6)",
                "self.m2t = nn.Linear(6, 6)",
                "self.m2t.weight = self.m2.weight",
                "self.head = nn.Linear(6, 3)",
            ),
            ("x = self.m2t(F.relu(self.m2(x)))", "x = self.head(x)"),
        ),
        Cut(2, (("head", "shard_in", 2, None),)),
        Run(steps=3),
        "re-cut",
        Cut(2, (("head", "shard_out", 2, None),), rows=(2, 1)),
    ),
    "an auxiliary head, and something that is looked at": Case(
        Net(
            (8,),
            (
                "self.m1 = nn.Linear(8, 6)",
                "self.aux = nn.Linear(6, 3)",
                "self.head = nn.Linear(6, 3)",
            ),
            ("m = F.relu(self.m1(x))", "x = self.head(m)"),
            "m, x, self.aux(m)",
            ("unused", "prediction", "auxiliary"),
        ),
        Cut(2),
    ),
    "in place, on parts that are converted before": Case(
        Net(
            (5, 8),
            ("self.m = nn.Linear(8, 16)", "self.head = nn.Linear(16, 3)"),
            (
                "y = self.m(x)",
                "y.masked_fill_(x[:, :, :1] > 0.3, 0.0)",
                "y = y * torch.sigmoid(y).detach().bernoulli_(0.5).tril_()",
                "x = self.head(y.mean(1))",
            ),
        ),
        Cut(2, (("m", "shard_out", 2, (3, 1)),), rows=(1, 2)),
        Run(batch_size=7),
    ),
    "a batch norm in evaluation alone, behind parts": Case(
        Net(
            (8,),
            (
                "self.m = nn.Linear(8, 6)",
                "self.m1 = nn.BatchNorm1d(6)",
                "self.head = nn.Linear(6, 3)",
            ),
            ("x = self.m(x)", "x = self.head(x if self.training else self.m1(x))"),
        ),
        Cut(2, (("m", "shard_out", 2, (2, 1)), ("head", "shard_in", 2, None))),
        Run(evaluate_every=1),
    ),
    "inputs changed in place, and evaluated after every step": Case(
        Net(
            (2, 9),
            ("self.head = nn.Linear(18, 3)",),
            ("x = x.transpose(1, 2)", "x += 0.1", "x = self.head(torch.flatten(x, 1))"),
        ),
        Cut(1),
        Run(steps=3, precision="fp32", evaluate_every=1),
    ),
    "an LSTM that evaluates no rows": Case(
        Net(
            (2, 9),
            (
                "self.m = nn.LSTM(9, 9, 2, dropout=0.2, batch_first=True)",
                "self.head = nn.Linear(18, 3)",
            ),
            ("x = self.m(x)[0]", "x = self.head(torch.flatten(x, 1))"),
        ),
        Cut(2, rows=(3, 0)),
        Run(precision="fp32"),
    ),
    "batch statistics in evaluation, resumed under other rows": Case(
        _OF_BATCH,
        Cut(4, rows=(1, 0, 1, 0), local=True),
        Run(evaluate_every=1, checkpoint_every=1),
        "resumed",
        Cut(4, local=True),
    ),
    "batch statistics in evaluation, re-cut to other rows": Case(
        _OF_BATCH,
        Cut(4, rows=(1, 0, 1, 0), local=True),
        Run(steps=3, evaluate_every=1, checkpoint_every=1),
        "re-cut",
        Cut(4, local=True),
    ),
    "fp16, beside a kink that the ranks' smaller products fall over": Case(
        Net(
            (3, 4),
            (
                "self.m2 = nn.MultiheadAttention(4, 1, dropout=0.2)",
                "self.m5 = nn.Linear(3, 3)",
                "self.m6 = Matrix(4, 6, 'product')",
                "self.m7 = nn.MultiheadAttention(6, 1, dropout=0.2)",
                "self.m7n = nn.LayerNorm(6)",
                "self.m7d = nn.Dropout(0.2)",
                "self.m7l = nn.Linear(6, 6)",
                "self.head = nn.Linear(18, 3)",
            ),
            (
                "x = F.relu(x) if self.training else x",
                "x = self.m6(x).permute(1, 0, 2)",
                "ym7 = self.m7n(x)",
                "x = x + self.m7d(self.m7(ym7, ym7, ym7, need_weights=False)[0])",
                "x = (x + F.relu(self.m7l(x))).transpose(0, 1)",
                "x = self.head(torch.flatten(x, 1))",
            ),
        ),
        Cut(2),
        Run(batch_size=13, samples=16, steps=2, optimizer="SGD(lr=0.1)", precision="fp16", seed=2),
    ),
    "an evaluation that is no number": Case(
        Net(
            (8,),
            (
                "self.m3 = StaysInEval(nn.BatchNorm1d(8))",
                "self.m8 = nn.Linear(8, 8)",
                "self.m9 = nn.Bilinear(8, 8, 4)",
                "self.head = nn.Linear(4, 3)",
            ),
            (
                "x = 1 - (x + self.m3(x))",
                *["x = (x.unsqueeze(1) * x.unsqueeze(2)).mean(2)"] * 2,
                "x = self.m8(x)",
                "x = self.head(self.m9(x, x))",
            ),
        ),
        Cut(4),
        Run(batch_size=6, samples=16, steps=3, optimizer="SGD(lr=0.1)"),
    ),
    "a norm with an activation, beside attention that a mask has written out": Case(
        Net(
            (2, 9),
            (
                "self.m1 = nn.Linear(9, 8)",
                "self.m3 = nn.MultiheadAttention(8, 1)",
                "self.m8 = Activated1d(4)",
                "self.head = nn.Linear(32, 3)",
            ),
            (
                "x = self.m1(x)",
                "ym3 = x.transpose(0, 1)",
                "pm3 = (x[..., 0] > 1) & (torch.arange(2) > 0)",
                "ym3 = self.m3(ym3, ym3, ym3, key_padding_mask=pm3)[0]",
                "x = self.m8(torch.cat([x, x], 1))",
                "x = self.head(torch.flatten(x, 1))",
            ),
        ),
        Cut(1),
        Run(steps=2),
    ),
    "rounds behind an operation in place": Case(
        Net(
            (2, 9),
            ("self.head = nn.Linear(2, 3)",),
            ("x = x.sum(2)", "x.add_(0.5)", "x = self.head(x)"),
        ),
        Cut(2, (("head", "duplicate", 2, None),), rounds="B/K"),
        Run(steps=2),
    ),
}
