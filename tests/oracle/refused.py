"""Cases that were once wrong and are refused by name now, with a word of the error."""

from tests.oracle.cases import Case, Cut, Run
from tests.oracle.models import Net

REFUSED = {
    "a running count": (
        Case(
            Net(
                (6,),
                ("self.register_buffer('m4', torch.zeros(1))", "self.head = nn.Linear(6, 3)"),
                ("self.m4.add_(1)", "x = self.head(x)"),
            )
        ),
        "m4",
    ),
    "no rows in another type than some, behind an operation in bf16": (
        Case(
            Net(
                (2, 8, 8),
                (
                    "self.m1 = nn.Conv2d(2, 4, 3, padding=1)",
                    "self.m8 = nn.LocalResponseNorm(2)",
                    "self.head = nn.Linear(256, 3)",
                ),
                ("x = self.head(torch.flatten(self.m8(self.m1(x)), 1))",),
            ),
            Cut(3, (("head", "shard_in", 3, None),), rows=(2, 0, 0)),
            Run(batch_size=6, steps=2, precision="bf16"),
        ),
        "m8",
    ),
    "running statistics of an instance norm": (
        Case(
            Net(
                (3, 6, 6),
                (
                    "self.m3 = nn.InstanceNorm2d(3, track_running_stats=True)",
                    "self.head = nn.Linear(108, 3)",
                ),
                ("x = self.head(torch.flatten(self.m3(x), 1))",),
            ),
            Cut(2),
        ),
        "m3",
    ),
    "one row for a local batch norm": (
        Case(
            Net(
                (6,),
                ("self.m3 = nn.BatchNorm1d(6)", "self.head = nn.Linear(6, 3)"),
                ("x = self.head(self.m3(x))",),
            ),
            Cut(4, local=True),
        ),
        "m3",
    ),
    "an operation that torch does not do to no rows": (
        Case(
            Net(
                (3, 6, 6),
                (
                    "self.m2 = nn.Conv2d(12, 8, 3, padding=1)",
                    "self.m3 = nn.MaxPool2d(2)",
                    "self.head = nn.Linear(8, 3)",
                ),
                (
                    "x = F.pixel_unshuffle(x, 2)",
                    "x = self.m3(self.m2(x))",
                    "x = self.head(torch.flatten(x, 1))",
                ),
            ),
            Cut(2, rows=(0, 1)),
        ),
        "pixel_unshuffle",
    ),
    "a part that is changed in place, and another part of the same is read": (
        Case(
            Net(
                (8,),
                ("self.head = nn.Linear(10, 3)",),
                (
                    "x = x * 1.5",
                    "m, n = x[:, :2], x[:, 1:3]",
                    "m += 1",
                    "x = self.head(torch.cat([x, n], 1))",
                ),
            )
        ),
        "m += 1",
    ),
    "no rows in bf16, of a layer that then gives fp32": (
        Case(
            Net(
                (2, 9),
                ("self.m = nn.LSTM(9, 9, batch_first=True)", "self.head = nn.Linear(18, 3)"),
                ("x = self.m(x)[0]", "x = self.head(torch.flatten(x, 1))"),
            ),
            Cut(3, (("head", "shard_out", 3, None),), rows=(2, 0, 3)),
            Run(batch_size=6, precision="bf16"),
        ),
        "layer 'm'",
    ),
    "a parameter that is changed through its data": (
        Case(
            Net(
                (8,),
                ("self.head = nn.Linear(8, 3)",),
                ("self.head.weight.data.mul_(0.9)", "x = self.head(x)"),
            )
        ),
        "forward writes into 'head.weight'",
    ),
    "a cut weight that evaluation reads whole, merged": (
        Case(
            Net(
                (8,),
                (
                    "self.m = nn.Linear(8, 8)",
                    "self.m1 = nn.Parameter(torch.rand(8, 2))",
                    "self.head = nn.Linear(8, 3)",
                ),
                (
                    "if self.training:",
                    "    x = self.m(x) + x @ self.m1 @ self.m1.t()",
                    "else:",
                    "    x = F.linear(x, self.m.weight + self.m1 @ self.m1.t(), self.m.bias)",
                    "x = self.head(x)",
                ),
            ),
            Cut(2, (("m", "shard_out", 2, None),)),
        ),
        "layer 'm': 'm.weight' is cut",
    ),
    "a shape that goes over samples": (
        Case(
            Net(
                (2, 9),
                ("self.head = nn.Linear(18, 3)",),
                ("n = x.shape[0]", "x = x.reshape(-1, 4, 2)", "x = self.head(x.reshape(n, 18))"),
            )
        ),
        "x.reshape(-1, 4, 2)",
    ),
    "outputs that nothing is said of": (
        Case(
            Net(
                (8,),
                ("self.m1 = nn.Linear(8, 6)", "self.head = nn.Linear(6, 3)"),
                ("m = F.relu(self.m1(x))", "x = self.head(m)"),
                "x, m",
            ),
        ),
        "outputs",
    ),
    "a branch for batches of more than one sample, and a batch of one": (
        Case(
            Net(
                (6,),
                ("self.m1 = nn.Parameter(torch.rand(1, 6))", "self.head = nn.Linear(6, 3)"),
                ("y = self.m1 * 2 if x.shape[0] != 1 else self.m1", "x = self.head(x * y)"),
            ),
            Cut(2),
            Run(batch_size=3),
        ),
        "decides otherwise for 1 sample",
    ),
    "rows that are repeated one after the other": (
        Case(
            Net(
                (8,),
                ("self.m1 = nn.Linear(8, 4)", "self.head = nn.Linear(8, 3)"),
                ("x = self.m1(x.repeat(2, 1)).reshape(-1, 8)", "x = self.head(x)"),
            ),
            Cut(2),
        ),
        "repeat",
    ),
    "attention to other samples, as torch's is unless told otherwise": (
        Case(
            Net(
                (4, 8),
                ("self.m = nn.MultiheadAttention(8, 2)", "self.head = nn.Linear(32, 3)"),
                ("x = self.m(x, x, x)[0]", "x = self.head(torch.flatten(x, 1))"),
            ),
            Cut(2),
        ),
        "batch_first=True",
    ),
}
