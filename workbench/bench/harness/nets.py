"""Networks for benchmarks: small ones that are trained, and those of the papers."""

import torch
from torch import Tensor, nn
from torch.nn.functional import adaptive_avg_pool2d, gelu, scaled_dot_product_attention, silu

from workbench.model.vision import torchvision

VGG_STAGES = ((1, 1), (2, 2), (4, 4, 4, 4))  # channels, in widths
INPUT_SHAPE = (3, 32, 32)


class SmallVGG(nn.Module):
    """64-64-M-128-128-M-256x4-M, then 4096-1024-1024-10: 7,580,746 parameters.

    `width` is the channels of the first stage; everything else is in proportion.

    Source: a 32 x 32 version of nagadomi's kaggle-cifar10-torch7 net.
    """

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers: list[nn.Module] = []
        channels = 3
        for stage in VGG_STAGES:
            for widths in stage:
                after = widths * width
                layers += [nn.Conv2d(channels, after, 3, padding=1), nn.ReLU(inplace=True)]
                channels = after
            layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Sequential(
            nn.Linear(64 * width, 16 * width),
            nn.ReLU(inplace=True),
            nn.Dropout(0.5),
            nn.Linear(16 * width, 16 * width),
            nn.ReLU(inplace=True),
            nn.Dropout(0.5),
            nn.Linear(16 * width, 10),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(torch.flatten(self.features(x), 1))


CIFAR_STAGES = ((60, 60), (120, 120), (240, 240), (480, 480))


class CifarNet(nn.Module):
    """Eight convolutions of 3 x 3 without bias, pooled after each pair, then 1920-256-10.

    All channels of the paper (4.6 M parameters) are divided by `divisor`.

    Source: Moreno-Alvarez et al. 2021 (doi:10.1016/j.neucom.2021.01.125), its CIFAR-10 network.
    """

    def __init__(self, divisor: int = 1) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers: list[nn.Module] = []
        channels = 3
        for stage in CIFAR_STAGES:
            for filters in (width // divisor for width in stage):
                layers += [nn.Conv2d(channels, filters, 3, padding=1, bias=False), nn.ReLU()]
                channels = filters
            layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Sequential(nn.Linear(4 * channels, 256), nn.ReLU(), nn.Linear(256, 10))

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(torch.flatten(self.features(x), 1))


DIGITS_SHAPE, COLOR_SHAPE = (1, 8, 8), (3, 32, 32)


def mlp() -> nn.Sequential:
    """64-512-512-10: 301,066 parameters, for 8 x 8 grey images."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(64, 512),
        nn.ReLU(),
        nn.Linear(512, 512),
        nn.ReLU(),
        nn.Linear(512, 10),
    )


def cnn(classes: int = 10) -> nn.Sequential:
    """Two convolutions and two linear layers, the first 2048-128: for 32 x 32 color images."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(2048, 128),
        nn.ReLU(),
        nn.Linear(128, classes),
    )


class SmoothDenseNet(nn.Module):
    """DenseNet-121 with SiLU in place of every ReLU.

    A ReLU whose input rounds to the other side of zero passes a gradient on or does not, however
    little the input changed; one such image of few is a large part of a gradient. With SiLU,
    gradients are continuous, and the same layers and shardings can be verified with a tight
    tolerance.
    """

    def __init__(self, num_classes: int = 10) -> None:
        super().__init__()
        torch.manual_seed(0)
        dense = torchvision().models.densenet121(num_classes=num_classes)
        self.features, self.classifier, self.last = dense.features, dense.classifier, nn.SiLU()
        for path, module in list(self.features.named_modules()):
            if isinstance(module, nn.ReLU):
                self.features.set_submodule(path, nn.SiLU())

    def forward(self, x: Tensor) -> Tensor:
        pooled = adaptive_avg_pool2d(self.last(self.features(x)), (1, 1))
        scores: Tensor = self.classifier(torch.flatten(pooled, 1))
        return scores


class Attention(nn.Module):
    """Causal attention with rotary positions, `queries` heads for each head of keys and values."""

    HEAD = 64
    cos: Tensor
    sin: Tensor

    def __init__(self, width: int, tokens: int, queries: int = 1) -> None:
        super().__init__()
        self.q, self.o = (nn.Linear(width, width, bias=False) for _ in range(2))
        self.k, self.v = (nn.Linear(width, width // queries, bias=False) for _ in range(2))
        self.grouped = queries > 1
        turns = 10_000.0 ** -(torch.arange(0, self.HEAD, 2) / self.HEAD)
        angles = torch.outer(torch.arange(tokens), torch.cat([turns, turns]))
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part(x).unflatten(-1, (-1, self.HEAD)) for part in (self.q, self.k, self.v))
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        q, k = self._turned(q), self._turned(k)
        mixed = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.grouped)
        return self.o(mixed.transpose(1, 2).flatten(2))

    def _turned(self, x: Tensor) -> Tensor:
        low, high = x.chunk(2, -1)
        return x * self.cos + torch.cat((-high, low), -1) * self.sin


class Block(nn.Module):
    """Attention, then an MLP of four times the width; each behind a norm, and added."""

    def __init__(self, width: int, tokens: int) -> None:
        super().__init__()
        self.before, self.attention = nn.LayerNorm(width), Attention(width, tokens)
        self.between = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.before(x))
        return x + self.down(gelu(self.up(self.between(x))))


class GPT(nn.Module):
    """A language model of so many blocks, for sequences of so many of a vocabulary's tokens."""

    def __init__(self, blocks: int, width: int, tokens: int, vocabulary: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, tokens) for _ in range(blocks))
        self.norm: nn.Module = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class GatedBlock(nn.Module):
    """Attention of grouped queries, then a gated MLP; each behind an RMS norm, and added."""

    def __init__(self, width: int, tokens: int) -> None:
        super().__init__()
        self.before, self.attention = nn.RMSNorm(width), Attention(width, tokens, queries=2)
        self.between = nn.RMSNorm(width)
        self.gate, self.up = (nn.Linear(width, 3 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(3 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.before(x))
        h = self.between(x)
        return x + self.down(silu(self.gate(h)) * self.up(h))


class Llama(GPT):
    """A language model of gated blocks, whose table is its head too."""

    def __init__(self, blocks: int, width: int, tokens: int, vocabulary: int) -> None:
        super().__init__(0, width, tokens, vocabulary)
        self.blocks = nn.ModuleList(GatedBlock(width, tokens) for _ in range(blocks))
        self.norm = nn.RMSNorm(width)
        self.head.weight = self.table.weight


class MaskedBlock(nn.Module):
    """Attention to the tokens of a mask, then an MLP; a norm behind each, with dropout."""

    HEAD = 64

    def __init__(self, width: int) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self.behind, self.last = nn.LayerNorm(width), nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (part(x).unflatten(-1, (-1, self.HEAD)) for part in (self.q, self.k, self.v))
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        mixed = scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = self.behind(x + self.drop(self.o(mixed.transpose(1, 2).flatten(2))))
        return self.last(x + self.drop(self.down(gelu(self.up(x)))))


class Encoder(nn.Module):
    """Scores of every token from the tokens on both sides that a mask allows: two inputs."""

    def __init__(self, blocks: int, width: int, tokens: int, vocabulary: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(vocabulary, width)
        self.places = nn.Parameter(torch.randn(tokens, width))
        self.norm = nn.LayerNorm(width)
        self.blocks = nn.ModuleList(MaskedBlock(width) for _ in range(blocks))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        x = self.norm(self.table(ids) + self.places)
        for block in self.blocks:
            x = block(x, mask[:, None, None, :])
        return self.head(x)
