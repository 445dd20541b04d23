"""Attention and gated units as people write them, each in a small model of token ids."""

import torch
import torch.nn.functional as F
from torch import nn

TOKENS, WIDTH, HEADS, VOCABULARY = 5, 24, 6, 11


class Separate(nn.Module):
    """Query, key and value by layers of their own; torch's fused kernel, causal."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = (f(x).view(b, t, HEADS, -1).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(y.transpose(1, 2).reshape(b, t, c))


class Dropped(Separate):
    """The same, not causal, and with dropout inside the kernel."""

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = (f(x).view(b, t, HEADS, -1).transpose(1, 2) for f in (self.q, self.k, self.v))
        p = 0.3 if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=p)
        return self.o(y.transpose(1, 2).reshape(b, t, c))


class Fused(nn.Module):
    """Query, key and value by one layer, taken apart by `split`."""

    def __init__(self):
        super().__init__()
        self.qkv, self.o = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        b, t, c = x.size()
        parts = self.qkv(x).split(c, dim=2)
        q, k, v = (part.view(b, t, HEADS, c // HEADS).transpose(1, 2) for part in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(y.transpose(1, 2).contiguous().view(b, t, c))


class Otherwise(Fused):
    """The same in training; in evaluation, heads are mixed."""

    def forward(self, x):
        if self.training:
            return super().forward(x)
        q, k, v = self.qkv(x).split(x.shape[2], dim=2)
        return self.o(q.flip(2) * k + v.cumsum(2))


class Grouped(nn.Module):
    """Rotary positions, and three query heads to a head of keys and values."""

    def __init__(self):
        super().__init__()
        d = WIDTH // HEADS
        self.q, self.o = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.k, self.v = (nn.Linear(WIDTH, WIDTH // 3, bias=False) for _ in range(2))
        turns = torch.arange(TOKENS)[:, None] * 100.0 ** -(torch.arange(0, d, 2) / d)
        self.register_buffer("cos", torch.cat([turns, turns], -1).cos())
        self.register_buffer("sin", torch.cat([turns, turns], -1).sin())

    def turned(self, x):
        low, high = x.chunk(2, -1)
        return x * self.cos + torch.cat((-high, low), -1) * self.sin

    def forward(self, x):
        shape = (*x.shape[:-1], -1, WIDTH // HEADS)
        q, k, v = (f(x).view(shape).transpose(1, 2) for f in (self.q, self.k, self.v))
        k, v = (one.repeat_interleave(3, dim=1) for one in (self.turned(k), v))
        y = F.scaled_dot_product_attention(self.turned(q), k, v, is_causal=True)
        return self.o(y.transpose(1, 2).flatten(2))


class Normed(Separate):
    """Norms of each head of the query and the key, with weights that all heads share."""

    def __init__(self):
        super().__init__()
        d = WIDTH // HEADS
        self.of_query, self.of_key = nn.Parameter(torch.rand(d) + 0.5), nn.Parameter(torch.rand(d))
        self.shift = nn.Parameter(torch.rand(d), requires_grad=False)

    def of_heads(self, x):
        return (f(x).view(*x.shape[:2], HEADS, -1) for f in (self.q, self.k, self.v))

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = self.of_heads(x)
        q, k = (one * one.square().mean(-1, keepdim=True).add(1e-6).rsqrt() for one in (q, k))
        q, k = self.of_query * q + self.shift, k * (1.0 + self.of_key)
        q, k, v = (one.transpose(1, 2) for one in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(y.transpose(1, 2).reshape(b, t, c))


class NormedTogether(Normed):
    """The same, of query, key and value by one layer: far fewer plans."""

    def __init__(self):
        super().__init__()
        del self.q, self.k, self.v
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def of_heads(self, x):
        return self.qkv(x).view(*x.shape[:2], 3, HEADS, -1).unbind(2)


class Written(nn.Module):
    """Scores, mask, softmax and dropout written out, of query, key and value in one layer."""

    def __init__(self):
        super().__init__()
        self.qkv, self.o, self.drop = (
            nn.Linear(WIDTH, 3 * WIDTH),
            nn.Linear(WIDTH, WIDTH),
            nn.Dropout(0.2),
        )
        self.register_buffer("seen", torch.ones(TOKENS, TOKENS).tril().bool())

    def forward(self, x):
        b, t, c = x.shape
        parts = self.qkv(x).view(b, t, 3, HEADS, c // HEADS).unbind(2)
        q, k, v = (part.transpose(1, 2) for part in parts)
        scores = q @ k.transpose(-2, -1) / (c // HEADS) ** 0.5
        weights = self.drop(scores.masked_fill(~self.seen, float("-inf")).softmax(-1))
        return self.o((weights @ v).transpose(1, 2).contiguous().view(b, t, c))


class Masked(Written):
    """The same with the mask first, and a type that is that of another tensor."""

    def forward(self, x):
        b, t, c = x.shape
        parts = self.qkv(x).view(b, t, 3, HEADS, c // HEADS).unbind(2)
        q, k, v = (part.transpose(1, 2) for part in parts)
        scores = torch.where(self.seen, q @ k.transpose(-2, -1) / (c // HEADS) ** 0.5, -1e9)
        weights = self.drop(scores.softmax(-1).to(q.dtype))
        return self.o((weights @ v).transpose(1, 2).contiguous().view(b, t, c))


class Relative(Separate):
    """Biases of relative positions: of each head, of one table, for two attentions."""

    def __init__(self):
        super().__init__()
        self.second = Separate()
        self.bias = nn.Embedding(2 * TOKENS - 1, HEADS)
        places = torch.arange(TOKENS)
        self.register_buffer("apart", places[:, None] - places + TOKENS - 1)

    @staticmethod
    def biased(layers, x, bias):
        shape = (*x.shape[:-1], HEADS, WIDTH // HEADS)
        q, k, v = (f(x).view(shape).transpose(1, 2) for f in (layers.q, layers.k, layers.v))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        return layers.o(y.transpose(1, 2).flatten(2))

    def forward(self, x):
        bias = self.bias(self.apart).permute(2, 0, 1).unsqueeze(0)
        x = x + self.biased(self, x, bias)
        return x + self.biased(self.second, x, bias)


class Sloped(Written):
    """Slopes of each head by the distance of tokens, and the least number of the type as mask."""

    def __init__(self):
        super().__init__()
        self.register_buffer("slopes", 0.5 ** torch.arange(1.0, HEADS + 1))
        self.scale = nn.Parameter(torch.rand(HEADS, 1, 1) + 0.5)

    def forward(self, x):
        b, t, c = x.shape
        parts = self.qkv(x).view(b, t, 3, HEADS, c // HEADS).unbind(2)
        q, k, v = (part.transpose(1, 2) for part in parts)
        places = torch.arange(t, device=x.device)
        scores = self.scale * (q @ k.transpose(-2, -1))
        scores = scores + self.slopes[:, None, None] * (places - places[:, None])
        weights = scores.masked_fill(~self.seen, torch.finfo(scores.dtype).min).softmax(-1)
        return self.o((weights @ v).transpose(1, 2).flatten(2))


class Sunk(Separate):
    """A score of each head that no token has, and whose weight is left out."""

    def __init__(self):
        super().__init__()
        self.sinks = nn.Parameter(torch.rand(HEADS))

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = (f(x).view(b, t, HEADS, -1).transpose(1, 2) for f in (self.q, self.k, self.v))
        sinks = self.sinks.reshape(1, -1, 1, 1).expand(b, -1, t, -1)
        weights = torch.cat([q @ k.transpose(-2, -1), sinks], dim=-1).softmax(-1)[..., :-1]
        return self.o((weights @ v).transpose(1, 2).flatten(2))


class Turned(nn.Module):
    """A linear layer as GPT-2 has it: its matrix is [in_features, out_features], its rows flat."""

    def __init__(self, into, out):
        super().__init__()
        self.weight, self.bias = (
            nn.Parameter(torch.randn(into, out) / 5),
            nn.Parameter(torch.ones(out)),
        )

    def forward(self, x):
        shape = (*x.size()[:-1], self.bias.numel())
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(shape)


class TurnedAndFused(Fused):
    """The same with matrices that lie so."""

    def __init__(self):
        super().__init__()
        self.qkv, self.o = Turned(WIDTH, 3 * WIDTH), Turned(WIDTH, WIDTH)


class Gated(nn.Module):
    """A gated unit whose two halves are one layer."""

    def __init__(self):
        super().__init__()
        self.both, self.down = nn.Linear(WIDTH, 60), nn.Linear(30, WIDTH)

    def forward(self, x):
        gate, up = self.both(x).chunk(2, -1)
        return self.down(F.silu(gate) * up)


INNER = {
    one.__name__: one
    for one in (
        Separate,
        Dropped,
        Fused,
        TurnedAndFused,
        Otherwise,
        Grouped,
        Normed,
        NormedTogether,
        Written,
        Masked,
        Relative,
        Sloped,
        Sunk,
        Gated,
    )
}


class Model(nn.Module):
    """Token ids in, scores of the next tokens out, with one such part in the middle."""

    def __init__(self, inner):
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, WIDTH)
        self.norm, self.inner = nn.LayerNorm(WIDTH), INNER[inner]()
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids):
        x = self.table(ids)
        return self.head(x + self.inner(self.norm(x)))


def made(inner):
    torch.manual_seed(0)
    return Model(inner)
