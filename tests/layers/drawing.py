"""Small nets that draw random numbers in every way that people write."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class DropPath(nn.Module):
    """Stochastic depth as timm has it."""

    def forward(self, x: Tensor) -> Tensor:
        keep = x.new_empty((x.shape[0],) + (1,) * (x.ndim - 1)).bernoulli_(0.7)
        return x * keep.div_(0.7)


class Modules(nn.Module):
    """Dropout of whole channels and of normalized features, slopes drawn; one module twice."""

    shape = (3, 4, 4)

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 3, padding=1)
        self.slopes = nn.RReLU()
        self.channels = nn.Dropout2d(0.3)
        self.path = DropPath()
        self.first = nn.Linear(96, 12)
        self.selu = nn.Sequential(nn.SELU(), nn.AlphaDropout(0.2), nn.FeatureAlphaDropout(0.3))
        self.second = nn.Linear(12, 10)
        self.last = nn.Linear(10, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        x = self.channels(x + self.path(self.slopes(x)))
        x = self.selu(self.first(self.channels(x).flatten(1)))
        return self.last(F.relu(self.second(x)))


class Functions(nn.Module):
    """Functions that drop, noise, a tensor of the parameters alone, and one without the batch."""

    shape = (6,)

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 12)
        self.scale = nn.Parameter(torch.randn(1, 12))
        self.second = nn.Linear(12, 9)
        self.mean = nn.Linear(9, 8)
        self.spread = nn.Linear(9, 8)
        self.last = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout(F.relu(self.first(x)), 0.3, self.training)
        x = x * F.dropout(self.scale, 0.2)
        x = F.dropout(F.relu(self.second(x)), 0.4, training=False)
        x = x * torch.rand(x.shape[0], 1, dtype=x.dtype)
        spread = F.softplus(self.spread(x))
        x = self.mean(x) + spread * torch.randn_like(spread) + torch.randn(8, dtype=x.dtype)
        x = x + torch.normal(x.detach(), spread.detach())
        x = x * torch.bernoulli(x.sigmoid().detach())
        return F.gumbel_softmax(self.last(x))


class Attention(nn.Module):
    """Attention with masks and dropout, as modules and as a function; a layer called twice."""

    shape = (4, 6)

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(6, 8)
        self.masked = nn.MultiheadAttention(8, 2, dropout=0.3, batch_first=True)
        self.block = nn.TransformerEncoderLayer(8, 4, 12, dropout=0.2, batch_first=True)
        self.second = nn.Linear(8, 24)
        self.recurrent = nn.LSTM(8, 8, 2, dropout=0.3, batch_first=True)
        self.wide = nn.Linear(8, 12)
        self.head = nn.Linear(12, 5)
        self.register_buffer("mask", torch.ones(4, 4, dtype=torch.bool).triu(1))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        x = x + self.masked(x, x, x, attn_mask=self.mask, need_weights=False)[0]
        x = x + self.masked(x, x, x, attn_mask=self.mask)[0]
        x = self.block(self.block(x))
        q, k, v = (y.view(-1, 4, 2, 4).transpose(1, 2) for y in self.second(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=0.4)
        x = x + y.transpose(1, 2).flatten(2)
        x = self.recurrent(x)[0]
        return self.head(F.relu(self.wide(x))[:, 0])


class Folded(nn.Module):
    """Attention among the tokens of several rows of each sample."""

    shape = (3, 4, 6)

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(6, 8)
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.4, batch_first=True)
        self.drop = nn.Dropout(0.3)
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x).reshape(-1, 4, 8)
        x = self.drop(x + self.attention(x, x, x)[0])
        return self.head(x.reshape(-1, 12, 8).mean(1))


NETS = (Modules, Functions, Attention, Folded)
