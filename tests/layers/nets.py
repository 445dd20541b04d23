"""Small nets that hold every kind of layer, and how to run them whole and split."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from workbench.comm.groups.world import World
from workbench.layers.cut import cut
from workbench.layers.cut_model import CutModel, RankGroups, group_specs
from workbench.layers.local.context import BatchContext
from workbench.model.tracing.trace import trace
from workbench.model.vision import torchvision
from workbench.plan.graph.graph import Graph
from workbench.plan.placement.placement import Shard
from workbench.plan.plans.plan import Plan

SEED = 5


class Images(nn.Module):
    """Convolutions of every sort, batch norm, pools, and a classifier."""

    shape = (3, 8, 8)

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 6, 3, padding=1),
            nn.BatchNorm2d(6),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
            nn.Conv2d(6, 12, 3, padding=1, groups=6),
            nn.Hardswish(inplace=True),
            nn.Conv2d(12, 7, 1, bias=False),
            nn.BatchNorm2d(7),
            nn.ReLU(inplace=True),
        )
        self.pool = nn.AdaptiveAvgPool2d(3)
        self.head = nn.Sequential(
            nn.Linear(63, 10),
            nn.ReLU(inplace=True),
            nn.Dropout(0.3),
            nn.Linear(10, 9),
            nn.GELU(),
            nn.Linear(9, 5),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.flatten(self.pool(self.features(x)), 1))


class Picture(nn.Module):
    """Convolutions and batch norm before a pool that repeats, dropout behind it."""

    shape = (3, 6, 6)

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.MaxPool2d(2)
        )
        self.pool = nn.AdaptiveAvgPool2d(4)
        self.head = nn.Sequential(
            nn.Flatten(),
            nn.Linear(64, 11),
            nn.ReLU(inplace=True),
            nn.Dropout(0.3),
            nn.Linear(11, 9),
            nn.Dropout(0.4),
            nn.GELU(),
            nn.Linear(9, 5),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.pool(self.features(x)))


class Residual(nn.Module):
    """Additions, a squeeze-and-excite product, and one ReLU called three times."""

    shape = (3, 6, 6)

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.a = nn.Conv2d(8, 8, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(8)
        self.b = nn.Conv2d(8, 8, 3, padding=1)
        self.squeeze = nn.Conv2d(8, 4, 1)
        self.excite = nn.Conv2d(4, 8, 1)
        self.drop = nn.Identity()  # hands its input on, which the ReLU then writes into
        self.relu = nn.ReLU(inplace=True)
        self.fc = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.stem(x))
        y = self.b(self.relu(self.drop(self.bn(self.a(x)))))
        scale = F.adaptive_avg_pool2d(y, 1)
        y = y * torch.sigmoid(self.excite(F.relu(self.squeeze(scale))))
        y += x
        return self.fc(self.relu(y).mean((2, 3)))


class Tokens(nn.Module):
    """Linear layers over sequences, a learnt token, sizes read at run time, attention."""

    shape = (4, 6)

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(6, 8)
        self.token = nn.Parameter(torch.randn(1, 1, 8))
        self.norm = nn.LayerNorm(8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(8, 12), nn.GELU(), nn.Dropout(0.2), nn.Linear(12, 8))
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], dim=1)
        y = self.norm(x)
        y, _ = self.attention(y, y, y, need_weights=False)
        x = x + y
        x = x + self.mlp(x)
        return self.head(x[:, 0])


class Tied(nn.Module):
    """A module called twice, and a weight that two modules share, among layers that are cut."""

    shape = (6,)

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.twice = nn.Linear(8, 8)
        self.between = nn.Linear(8, 9)
        self.encode = nn.Linear(9, 7)
        self.decode = nn.Linear(9, 7)
        self.decode.weight = self.encode.weight
        self.last = nn.Linear(7, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.first(x))
        x = torch.relu(self.twice(torch.relu(self.twice(x))))
        x = torch.relu(self.between(x))
        return self.last(torch.relu(self.encode(x) + self.decode(x)))


class Words(nn.Module):
    """Two tables of tokens, one of them also the matrix of a layer that has a bias of its own."""

    shape = (4,)
    vocabulary = 7

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 6)
        self.other = nn.Embedding(7, 6, padding_idx=2)
        self.places = nn.Embedding(4, 6)
        self.norm = nn.LayerNorm(6)
        self.middle = nn.Linear(6, 6)
        self.scores = nn.Linear(6, 7)
        self.scores.weight = self.table.weight
        self.head = nn.Linear(28, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.table(x) * torch.tanh(self.other(x)) + self.places(torch.arange(x.shape[1]))
        x = self.scores(x + torch.relu(self.middle(self.norm(x))))
        return self.head(torch.sigmoid(x).flatten(1))


class Attending(nn.Module):
    """A transformer's block, three heads, attention weights that are dropped."""

    shape = (4, 6)

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(6, 12)
        self.norm = nn.LayerNorm(12)
        self.attention = nn.MultiheadAttention(12, 3, dropout=0.3, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(12, 9), nn.GELU(), nn.Linear(9, 12))
        self.again = nn.MultiheadAttention(12, 6, bias=False, batch_first=True)
        self.head = nn.Linear(12, 5)
        nn.init.normal_(self.attention.in_proj_bias)
        nn.init.normal_(self.attention.out_proj.bias)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        y = self.norm(x)
        x = x + self.attention(y, y, y)[0]
        x = x + self.mlp(x)
        y, _ = self.again(x, x, x, need_weights=False)
        return self.head(y[:, 0])


class Windows(nn.Module):
    """Swin's blocks of either version: windows that do not divide the image, shifted."""

    shape = (6, 5, 4)

    def __init__(self, attention: str = "ShiftedWindowAttention") -> None:
        super().__init__()
        make = getattr(torchvision().models.swin_transformer, attention)
        self.embed = nn.Linear(4, 6)
        self.attend = make(6, [3, 2], [1, 1], 3, attention_dropout=0.3, dropout=0.2)
        self.norm = nn.LayerNorm(6)
        self.still = make(6, [2, 3], [0, 0], 2)
        self.head = nn.Linear(6, 5)
        for weight in (*self.attend.parameters(), *self.still.parameters()):
            nn.init.normal_(weight, std=0.5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        x = x + self.norm(self.attend(x))
        return self.head((x + self.still(x)).mean((1, 2)))


class WindowsV2(Windows):
    """Cosine attention, and biases that a net of their own gives."""

    def __init__(self) -> None:
        super().__init__("ShiftedWindowAttentionV2")


NETS = (Images, Picture, Residual, Tokens, Tied, Words, Attending, Windows, WindowsV2)


class Memory:
    """A reader of weights that stand in memory."""

    def __init__(self, state: dict[str, Tensor]) -> None:
        self.state = state
        self.names = tuple(state)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.state[name].shape)

    def read(self, name: str, shard: Shard | None = None, rank: int = 0) -> Tensor:
        whole = self.state[name]
        piece = whole if shard is None else piece_under(shard, whole, rank)
        return piece.clone(memory_format=torch.contiguous_format)


def made(net: type[nn.Module]) -> nn.Module:
    """The net in double precision, the same every time."""
    torch.manual_seed(SEED)
    return net().double()


def tokens_of(net: type[nn.Module]) -> int | None:
    """The number of tokens of a net that reads token ids."""
    return getattr(net, "vocabulary", None)


def traced(net: type[nn.Module]) -> Graph:
    """The net's graph."""
    return trace(net(), input_shape=net.shape, vocabulary=tokens_of(net))  # type: ignore[attr-defined]


class Graphs(dict[type[nn.Module], Graph]):
    """The graphs of nets, each traced when it is first asked for.

    Every process that runs one of a file's tests imports the file, and needs few of its graphs.
    """

    def __missing__(self, net: type[nn.Module]) -> Graph:
        graph = self[net] = traced(net)
        return graph


def batch(net: type[nn.Module], count: int, step: int = 0) -> tuple[Tensor, Tensor]:
    """Inputs and labels of a step, the same every time."""
    generator = torch.Generator().manual_seed(SEED + step)
    shape, tokens = (count, *net.shape), tokens_of(net)  # type: ignore[attr-defined]
    if tokens is None:
        images = torch.randn(shape, generator=generator, dtype=torch.float64)
    else:
        images = torch.randint(tokens, shape, generator=generator)
    return images, torch.randint(5, (count,), generator=generator)


def cut_net(
    world: World,
    plan: Plan,
    net: type[nn.Module],
    rows: Sequence[int],
    groups: RankGroups | None = None,
) -> CutModel:
    """This rank's part of the net, told of its rows; in new groups, if none are given."""
    groups = world.groups(group_specs(plan)) if groups is None else groups
    context = BatchContext(world.rank, tuple(rows), seed=SEED)
    reader = Memory(made(net).state_dict())
    return cut(plan, context, groups, reader, device=world.device)


def piece_of(plan: Plan, name: str, whole: Tensor, rank: int) -> Tensor:
    """What a rank holds of a whole tensor that lies as the weight of this name."""
    placed = plan.flow.weights[name]
    if not isinstance(placed.placement, Shard):
        return whole
    return piece_under(placed.placement, whole, rank % placed.group_size)


def piece_under(shard: Shard, whole: Tensor, rank: int) -> Tensor:
    """Rank's part of every block, one behind the other."""
    return torch.cat([whole.narrow(shard.dim, *span) for span in shard.spans(rank)], shard.dim)
