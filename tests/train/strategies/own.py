"""Strategies of one's own, as people write them, and the same in plain torch for one process."""

from collections import deque

import torch
import torch.nn.functional as F
from torch import nn

from workbench.plan.experiment.experiment import Synthetic
from workbench.plan.experiment.sync import Strategy
from workbench.plan.graph.graph import Input
from workbench.plan.placement.placement import apportion, shard_group
from workbench.train.data.datasets import open_data
from workbench.train.data.feed import rows_of_step

SHAPE, SAMPLES, BATCH = (3, 6, 6), 26, 10  # the third batch of an epoch is shorter
LR, MOMENTUM = 0.05, 0.9


class SlowMo(Strategy):
    """Outer momentum over local SGD."""

    exchanges = "weights"
    remembers = {"slow": "weight", "speed": 0.0}  # noqa: RUF012

    def __init__(self, every=3, beta=0.7, warmup=0, momentum="keep"):
        self.every, self.beta, self.warmup, self.momentum = every, beta, warmup, momentum

    def averaged(self, step, mean, state):
        state["speed"].mul_(self.beta).add_(state["slow"] - mean)
        state["slow"].sub_(state["speed"])
        return state["slow"]


class Prox(Strategy):
    """Local steps that are held near the weights of the last averaging (FedProx)."""

    exchanges, every = "weights", 2
    remembers = {"anchor": "weight"}  # noqa: RUF012

    def gradient(self, step, grad, weight, then, state):
        return grad + 0.3 * (weight - state["anchor"])

    def averaged(self, step, mean, state):
        state["anchor"] = mean.clone()
        return mean


class Adaptive(Strategy):
    """Late gradients, corrected by how large they were so far."""

    late, keeps_weights = 2, True
    remembers = {"square": 0.5}  # noqa: RUF012

    def __init__(self, warmup=0):
        self.warmup = warmup

    def gradient(self, step, grad, weight, then, state):
        state["square"].mul_(0.9).addcmul_(grad, grad, value=0.1)
        return grad + 0.5 * grad * grad / (state["square"].sqrt() + 0.1) * (weight - then)


class EveryThird(Strategy):
    """Gradients of three steps are added up, and their mean is used."""

    every = 3

    def gradient(self, step, grad, weight, then, state):
        return grad / 3


class Heavy(Strategy):
    """A momentum of its own in front of the optimizer, in every step."""

    remembers = {"velocity": 0.0}  # noqa: RUF012

    def gradient(self, step, grad, weight, then, state):
        return state["velocity"].mul_(0.5).add_(grad)


def net() -> nn.Module:
    torch.manual_seed(3)
    head = (nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten())
    return nn.Sequential(*head, nn.Linear(36, 14), nn.Tanh(), nn.Linear(14, 10))


def batch(step):
    order = rows_of_step(SAMPLES, BATCH, 0, step)
    images, labels = open_data(Synthetic(samples=SAMPLES), (Input(SHAPE),), 10, "train").batch(
        order
    )
    return images.double(), labels


def clipped(grads, norm):
    total = torch.stack([g.square().sum() for g in grads]).sum().sqrt()
    return [g * (norm / (total + 1e-6)).clamp(max=1.0) for g in grads]


def with_sums(strategy, steps, clip=None, ema=None, halved=None):
    """What one process makes of the whole batch: sums, late ones, or of several steps.

    With `ema`, averages of weights; the rate is halved every `halved` steps.
    """
    model = net().double()
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters, lr=LR, momentum=MOMENTUM)
    flying, added, square, velocity = deque(), None, None, None
    averages = {name: p.detach().clone() for name, p in model.named_parameters()}
    for step in range(steps):
        then = [p.detach().clone() for p in parameters]
        images, labels = batch(step)
        grads = torch.autograd.grad(F.cross_entropy(model(images), labels), parameters)
        if isinstance(strategy, Adaptive) and step >= strategy.warmup:
            flying.append((grads, then))
            if len(flying) <= 2:
                continue
            grads, then = flying.popleft()
            square = [torch.full_like(g, 0.5) for g in grads] if square is None else square
            square = [0.9 * s + 0.1 * g * g for s, g in zip(square, grads, strict=True)]
            grads = [
                g + 0.5 * g * g / (s.sqrt() + 0.1) * (p.detach() - w)
                for g, s, p, w in zip(grads, square, parameters, then, strict=True)
            ]
        if isinstance(strategy, EveryThird):
            added = grads if added is None else [a + g for a, g in zip(added, grads, strict=True)]
            if (step + 1) % 3:
                continue
            grads, added = [a / 3 for a in added], None
        if isinstance(strategy, Heavy):
            velocity = [torch.zeros_like(g) for g in grads] if velocity is None else velocity
            velocity = grads = [0.5 * v + g for v, g in zip(velocity, grads, strict=True)]
        grads = grads if clip is None else clipped(grads, clip)
        for p, g in zip(parameters, grads, strict=True):
            p.grad = g.clone()
        if halved is not None:
            optimizer.param_groups[0]["lr"] = LR * 0.5 ** (step // halved)
        optimizer.step()
        for name, p in model.named_parameters() if ema is not None else ():
            averages[name] = ema * averages[name] + (1 - ema) * p.detach()
    return model.state_dict() if ema is None else averages


def with_means(strategy, steps, world, k, shares=None):
    """Copies of the head for each rank, and of the tail for each group of k, in one process."""
    parts = [(net().double()[:4], net().double()[4:])[index >= world] for index in range(world * 2)]
    parts = parts[: world + world // k]
    members = [(r,) for r in range(world)] + [shard_group(g * k, k) for g in range(world // k)]
    optimizers = [torch.optim.SGD(p.parameters(), lr=LR, momentum=MOMENTUM) for p in parts]
    memory, since, momentum = {}, [0] * world, getattr(strategy, "momentum", "keep")
    anchors = {id(p): p.detach().clone() for part in parts for p in part.parameters()}
    for step in range(steps):
        images, labels = batch(step)
        rows = apportion(len(images), shares or (1,) * world)
        x, y = images.split(list(rows)), labels.split(list(rows))
        for part in parts:
            part.zero_grad()
        for group, tail in zip(members[world:], parts[world:], strict=True):
            features = torch.cat([parts[rank](x[rank]) for rank in group])
            loss = F.cross_entropy(
                tail(features), torch.cat([y[r] for r in group]), reduction="sum"
            )
            loss.backward()
        warm = step < getattr(strategy, "warmup", 0)
        for part, group in zip(parts, members, strict=True):
            seen = sum(rows[rank] for rank in group)
            for p in part.parameters():
                p.grad = torch.zeros_like(p) if p.grad is None else p.grad / max(1, seen)
                if isinstance(strategy, Prox):
                    p.grad += 0.3 * (p.detach() - anchors[id(p)])
        if warm:  # the mean gradient over all rows
            mean_of(parts, members, world, rows, lambda p: p.grad)
        for optimizer in optimizers:
            optimizer.step()
        since = [0] * world if warm else [a + b for a, b in zip(since, rows, strict=True)]
        if warm and step + 1 == strategy.warmup:
            memory.clear()
            anchors = {id(p): p.detach().clone() for part in parts for p in part.parameters()}
        due = not warm and (step + 1) % strategy.every == 0
        if due or (step + 1 == steps and any(since)):
            mean_of(parts, members, world, since, lambda p: p.data)
            speeds = {p: s["momentum_buffer"] for o in optimizers for p, s in o.state.items()}
            if momentum == "average":
                mean_of(parts, members, world, since, speeds.__getitem__)
            for speed in speeds.values() if momentum == "reset" else ():
                speed.zero_()
            since = [0] * world
        for part in parts if due else ():
            for p in part.parameters():
                if isinstance(strategy, SlowMo):
                    speed = memory.get(id(p), 0.0) * strategy.beta + (anchors[id(p)] - p.detach())
                    memory[id(p)] = speed
                    p.data = anchors[id(p)] - speed
                anchors[id(p)] = p.detach().clone()
    return parts[0].state_dict() | parts[world].state_dict()


@torch.no_grad()
def mean_of(parts, members, world, rows, what):
    """The mean over copies, weighted by rows, put into each of them."""
    for copies, groups in ((parts[:world], members[:world]), (parts[world:], members[world:])):
        seen = [sum(rows[rank] for rank in group) for group in groups]
        for same in zip(*(part.parameters() for part in copies), strict=True):
            mean = sum(what(p) * n / sum(seen) for p, n in zip(same, seen, strict=True))
            for p in same:
                what(p).copy_(mean)
