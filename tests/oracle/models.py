"""Modules as people write them: source text, line by line, that is made a class.

A description is reproduced by its repr, and an error names a line of it. Lines can be left out
one by one, so that what fails can be made small.
"""

import copy
import hashlib
import itertools
import linecache
import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Net:
    """A module.

    Attributes:
        shape: of one sample.
        init: lines of `__init__`.
        forward: lines of `forward`, from `x`, a batch of samples, to `x`, scores.
        returns: what is returned.
        roles: what each returned tensor is for; empty: nothing is said.
        vocabulary: the number of tokens, if samples are token ids.
    """

    shape: tuple[int, ...]
    init: tuple[str, ...]
    forward: tuple[str, ...]
    returns: str = "x"
    roles: tuple[str, ...] = ()
    vocabulary: int | None = None

    @cached_property
    def source(self) -> str:
        """The class, as text."""
        lines = ["class Net(nn.Module):", "    def __init__(self):", "        super().__init__()"]
        lines += [f"        {line}" for line in self.init]
        lines += ["    def forward(self, x):"]
        lines += [f"        {line}" for line in self.forward]
        lines += [f"        return {self.returns}"]
        return "\n".join(lines) + "\n"

    def build(self) -> nn.Module:
        """The module, in float32, with the same values every time; no two of them are alike."""
        name = f"<net {hashlib.sha256(self.source.encode()).hexdigest()[:12]}>"
        linecache.cache[name] = (len(self.source), None, self.source.splitlines(True), name)
        space: dict[str, Any] = {**vars(HELPERS), "__name__": "generated"}
        exec(compile(self.source, name, "exec"), space)
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(0)
            module: nn.Module = space["Net"]()
            _vary(module)
        return module

    def runs(self, samples: int = 4) -> tuple[Tensor, ...] | None:
        """What torch itself gives in training and in evaluation; None where it does not run.

        It runs where both are finite, have a row for each sample, and training has gradients.
        """
        try:
            module = self.build()
            with torch.random.fork_rng(devices=()):
                x = torch.randn(samples, *self.shape)
                if self.vocabulary is not None:
                    x = torch.randint(self.vocabulary, x.shape)
                found = [self.outputs(module(x))[0], self.outputs(module.eval()(x))[0]]
            if found[0].requires_grad:
                found[0].square().sum().backward()
        except (RuntimeError, ValueError, TypeError, IndexError, AssertionError, KeyError,
                AttributeError, NameError, SyntaxError):  # fmt: skip
            return None
        alike = found[0].shape == found[1].shape and found[0].shape[:1] == (samples,)
        finite = all(one.isfinite().all() for one in found)
        return tuple(one.detach() for one in found) if alike and finite else None

    def outputs(self, returned: Any) -> tuple[Tensor, ...]:
        """What is trained of what the module returns: its scores, and auxiliary ones."""
        if isinstance(returned, Tensor):
            return (returned,)
        values = tuple(returned.values()) if isinstance(returned, dict) else returned
        roles = self.roles or ("prediction", *("auxiliary",) * (len(values) - 1))
        kept = sorted(zip(roles, range(len(values)), values, strict=False), key=_turn)
        return tuple(value for role, _, value in kept if role != "unused" and value is not None)

    def __repr__(self) -> str:
        fields = [f"shape={self.shape}", f"init={self.init}", f"forward={self.forward}"]
        fields += [f"returns={self.returns!r}"] if self.returns != "x" else []
        fields += [f"roles={self.roles}"] if self.roles else []
        fields += [f"vocabulary={self.vocabulary}"] if self.vocabulary else []
        return f"Net({', '.join(fields)})"


def _turn(item: tuple[str, int, Any]) -> tuple[bool, int]:
    return item[0] != "prediction", item[1]


@torch.no_grad()
def _vary(module: nn.Module) -> None:
    """Moves what is constant, as fresh norms are: in a wrong place nobody could see it."""
    for tensor in module.parameters():
        if tensor.numel() and (tensor == tensor.flatten()[0]).all():
            tensor.add_(0.1 * torch.randn(tensor.shape))
    for name, tensor in module.named_buffers():
        if name.endswith("running_mean"):
            tensor.add_(0.1 * torch.randn(tensor.shape))
        elif name.endswith("running_var"):
            tensor.mul_(1.0 + 0.2 * torch.rand(tensor.shape))


class _Activated:
    """A batch norm with an activation inside, as libraries of models have it."""

    def __init__(self, channels: int, **arguments: Any) -> None:
        super().__init__(channels, **arguments)
        self.act = nn.Tanh()

    def forward(self: Any, x: Tensor) -> Tensor:
        if self.training and self.track_running_stats:
            self.num_batches_tracked.add_(1)
        kept = not self.training or self.track_running_stats
        x = F.batch_norm(
            x,
            self.running_mean if kept else None,
            self.running_var if kept else None,
            self.weight,
            self.bias,
            self.training or self.running_mean is None,
            self.momentum,
            self.eps,
        )
        return self.act(x)


class HELPERS:
    """What the lines may name."""

    torch, nn, F, Tensor, math = torch, nn, F, Tensor, math
    copy, itertools = copy, itertools

    class Calls:
        """Counts its calls, and gives more after some of them."""

        number = 0

        def more(self) -> float:
            self.number += 1
            return 1.0 if self.number < 5 else 2.0

    class Activated1d(_Activated, nn.BatchNorm1d):
        """Of signals and vectors."""

    class Activated2d(_Activated, nn.BatchNorm2d):
        """Of images."""

    class Activated3d(_Activated, nn.BatchNorm3d):
        """Of volumes."""

    class StaysInEval(nn.Module):
        """A part that is kept in evaluation mode while the rest trains."""

        def __init__(self, part: nn.Module) -> None:
            super().__init__()
            self.part = part

        def train(self, mode: bool = True) -> nn.Module:
            return super().train(False)

        def forward(self, x: Tensor) -> Tensor:
            return self.part(x)

    class Noise(nn.Module):
        """Gaussian noise while training."""

        def __init__(self, scale: float) -> None:
            super().__init__()
            self.scale = scale

        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                x = x + self.scale * torch.randn_like(x)
            return x

    class Matrix(nn.Module):
        """A linear layer of one's own: as GPT-2 has it, as a product and a sum, or as torch's."""

        def __init__(self, into: int, out: int, way: str, names: str = "weight bias") -> None:
            super().__init__()
            self.way, self.names = way, names.split()
            sizes = (out, into) if way == "linear" else (into, out)
            values = 0.3 * torch.randn(sizes), torch.rand(out)
            for name, value in zip(self.names, values, strict=True):
                self.register_parameter(name, nn.Parameter(value))

        def forward(self, x: Tensor) -> Tensor:
            matrix, vector = (getattr(self, name) for name in self.names)
            if self.way == "linear":
                return F.linear(x, matrix, vector)
            if self.way == "product":
                return x @ matrix + vector
            rows = torch.addmm(vector, x.reshape(-1, x.size(-1)), matrix)
            return rows.view(*x.shape[:-1], vector.numel())

    class Experts(nn.Module):
        """A mixture of two experts, which sorts the rows by them and counts those of each."""

        def __init__(self, width: int) -> None:
            super().__init__()
            self.weight = nn.Parameter(0.3 * torch.randn(2, width, width))

        def forward(self, x: Tensor) -> Tensor:
            order = (x[:, 0] > 0).long().argsort()
            chosen = (x[order, 0] > 0).long()
            ends = torch.histc(chosen.float(), bins=2, min=0, max=1).cumsum(0)
            expert = torch.searchsorted(ends, torch.arange(len(x), dtype=ends.dtype), right=True)
            y = torch.einsum("rd,rdo->ro", x[order], self.weight[expert])
            return torch.zeros_like(y).index_copy(0, order, y)

    class Straight(nn.Module):
        """A sign that passes its gradient on, in a module of its own."""

        class Sign(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: Tensor) -> Tensor:
                return x.sign()

            @staticmethod
            def backward(ctx: Any, grad: Tensor) -> Tensor:
                return grad * 0.5

        def forward(self, x: Tensor) -> Tensor:
            return self.Sign.apply(x)

    class Attention(nn.Module):
        """Self-attention written out, as in many small transformers."""

        def __init__(self, width: int, heads: int, drop: float, causal: bool) -> None:
            super().__init__()
            self.heads, self.drop, self.causal = heads, drop, causal
            self.qkv = nn.Linear(width, 3 * width)
            self.out = nn.Linear(width, width)

        def forward(self, x: Tensor) -> Tensor:
            rows, tokens, width = x.shape
            qkv = self.qkv(x).reshape(rows, tokens, 3, self.heads, width // self.heads)
            q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
            drop = self.drop if self.training else 0.0
            x = F.scaled_dot_product_attention(q, k, v, dropout_p=drop, is_causal=self.causal)
            return self.out(x.transpose(1, 2).reshape(rows, tokens, width))

    class Caching(nn.Module):
        """Keeps what it makes of its weight till it trains; its forward is another method."""

        def __init__(self, width: int) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.rand(width))
            self.made: dict[str, Tensor] = {}
            self.forward = self.forward_kept  # type: ignore[method-assign]

        def train(self, mode: bool = True) -> Self:
            super().train(mode)
            if mode:
                self.made = {}
            return self

        def forward_kept(self, x: Tensor) -> Tensor:
            if self.training:
                return x * self.weight.exp()
            if "factor" not in self.made:
                self.made["factor"] = self.weight.exp()
            return x * self.made["factor"]

    class Scaled(nn.Embedding):
        """An embedding with a factor, as Gemma's; and the type of its table is read."""

        factor: Tensor

        def __init__(self, tokens: int, width: int) -> None:
            super().__init__(tokens, width, padding_idx=1)
            self.register_buffer("factor", torch.tensor(3.0), persistent=False)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.factor.to(self.weight.dtype)

    @staticmethod
    def still(norm: nn.Module, *, gone: bool = False) -> nn.Module:
        """A batch norm whose statistics do not move any more; or are gone."""
        norm.track_running_stats = False
        if gone:
            norm.running_mean = norm.running_var = None
        return norm

    @staticmethod
    def frozen(module: nn.Module, *names: str) -> nn.Module:
        """The module with these parameters, or all of them, frozen."""
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(bool(names) and name not in names)
        return module
