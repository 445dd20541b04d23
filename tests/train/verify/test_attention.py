"""Verification of transformers, of rounds, and of models with several heads."""

import pytest
import torch
from torch import nn

from tests.train.runs import verified
from tests.train.small import net
from workbench.client.verifying import experiment_for
from workbench.model.tracing.trace import trace
from workbench.model.vision import torchvision
from workbench.plan.experiment.experiment import SGD, Experiment, Synthetic
from workbench.plan.plans.plan import Plan
from workbench.train.verify.whole_model import trained_on

RANKS = 3


def vit():
    torch.manual_seed(0)
    return torchvision().models.VisionTransformer(
        image_size=8, patch_size=4, num_layers=2, num_heads=4, hidden_dim=24, mlp_dim=48,
        dropout=0.1, attention_dropout=0.2, num_classes=10,
    )  # fmt: skip


def swin(version):
    torch.manual_seed(0)
    models = torchvision().models.swin_transformer
    v2 = {"block": models.SwinTransformerBlockV2, "downsample_layer": models.PatchMergingV2}
    return models.SwinTransformer(
        patch_size=[2, 2], embed_dim=12, depths=[2, 1], num_heads=[3, 6], window_size=[3, 3],
        dropout=0.1, attention_dropout=0.2, num_classes=10, **(v2 if version == 2 else {}),
    )  # fmt: skip


class Encoder(nn.Module):
    """torch's own encoder, of which a token reads none behind it."""

    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(24, 4, 48, dropout=0.2, batch_first=True)
        self.embed, self.head = nn.Linear(64, 24), nn.Linear(24, 10)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(3))

    def forward(self, x):
        x = self.encoder(self.embed(x.flatten(2)), mask=self.mask, is_causal=True)
        return self.head(x.mean(1))


def encoder():
    torch.manual_seed(0)
    return Encoder()


MODELS = {"encoder": encoder, "vit": vit, "swin": lambda: swin(1), "swin_v2": lambda: swin(2)}


def exact(on_ranks, tmp_path, plan, module):
    """Everything is as in one process, and every weight was compared."""
    given = dict(precision="fp64", optimizer=None, data=None, seed=0)
    run = experiment_for(plan, batch_size=6, steps=2, **given)
    found = verified(on_ranks, tmp_path, run, module)
    names = {weight.name for layer in plan.graph.layers for weight in layer.weights}
    assert names == {d.name for d in found.differences if d.what in ("weight", "buffer")}
    assert found.exact, found
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_transformers_are_exact(on_ranks, tmp_path, name):
    module = MODELS[name]()
    plan = Plan.hybrid(trace(module, input_shape=(3, 8, 8)), RANKS)
    attention = [layer.name for layer in plan.graph.layers if layer.kind == "attention"]
    for layer in attention:  # those too that the rule leaves whole
        plan = plan.with_layer(layer, scheme="shard_heads", group_size=RANKS)
    plan = plan.with_layer(attention[0], shares=(2, 0, 1))
    exact(on_ranks, tmp_path, plan, module)


@pytest.mark.parametrize("mode", ["local", "synchronized"])
@pytest.mark.parametrize("rounds", ["B", "B/K"])
@pytest.mark.parametrize(("world", "k"), [(4, 2), (3, 3)])
def test_rounds_are_exact(on_ranks, tmp_path, rounds, mode, world, k):
    """Of three steps an epoch the last one is short."""
    graph = trace(net(), input_shape=(3, 8, 8))
    run = Experiment(
        plan=Plan.hybrid(graph, world, k, rounds=rounds).with_batch_norm(mode),
        data=Synthetic(samples=26),
        batch_size=10,
        optimizer=SGD(lr=0.05, momentum=0.9),
        steps=4,
        precision="fp64",
    )
    found = verified(on_ranks, tmp_path, run, net())
    assert {d.what for d in found.differences} >= {"output", "gradient", "weight"}
    assert found.worst.error < 1e-10, found


class Once(nn.Module):
    """Attention behind the only gather of rows."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(6, 12)
        self.attention = nn.MultiheadAttention(12, 3, dropout=0.2, batch_first=True)
        self.head = nn.Linear(12, 10)

    def forward(self, x):
        x = self.embed(x.flatten(2))
        return self.head(self.attention(x, x, x, need_weights=False)[0].mean(1))


@pytest.mark.parametrize("rounds", ["B", "B/K"])
def test_heads_in_rounds_are_exact(on_ranks, tmp_path, rounds):
    torch.manual_seed(0)
    module = Once()
    plan = Plan.data_parallel(trace(module, input_shape=(4, 3, 2)), 2)
    plan = plan.with_layer("attention", scheme="shard_heads").with_rounds(rounds)
    assert plan.tail is not None
    exact(on_ranks, tmp_path, plan, module)


class Heads(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(4, 6), nn.Linear(6, 5)
        self.beside, self.further = nn.Linear(6, 5), nn.Linear(6, 5)

    def forward(self, x):
        h = torch.tanh(self.body(x))
        return self.beside(h), self.head(h), h, self.further(torch.tanh(h))


def test_auxiliary_heads_are_trained_as_one_process_trains_them(on_ranks, tmp_path):
    torch.manual_seed(0)
    module = Heads()
    outputs = ("auxiliary", "prediction", "unused", "auxiliary")
    graph = trace(module, input_shape=(4,), outputs=outputs)
    plan = Plan.data_parallel(graph, 2).with_layer("beside", scheme="shard_out", group_size=2)
    found = exact(on_ranks, tmp_path, plan, module)
    compared = {d.name for d in found.differences if d.what == "output"}
    assert compared == {"head", "beside", "further"}


def test_heads_that_a_model_was_built_without_are_none():
    a, b = torch.zeros(1), torch.ones(1)
    assert trained_on(a) == (a,)
    assert trained_on((a, None, b)) == (a, b)
