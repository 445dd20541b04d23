"""Ranks that have nothing of a layer give on what the others do: under autocast, bf16 or fp16."""

import pytest
import torch

from tests.layers import nets
from tests.layers.drawn import GRAPHS
from tests.train.runs import started
from workbench.layers.local.idle import LayerDtypes
from workbench.model.tracing.trace import skeleton
from workbench.model.weights.initial import initialize
from workbench.plan.experiment.experiment import SGD, Experiment, Synthetic
from workbench.plan.plans.plan import Plan
from workbench.train.step.loss import own_rows

CLASSES = 5


def filters(net):
    return Plan.filters(GRAPHS[net], 3, (8, 0, 3), grain=1)


def heads(net, name):
    plan = Plan.data_parallel(GRAPHS[net], 3)
    return plan.with_layer(name, scheme="shard_heads", shares=(2, 0, 1))


PLANS = {
    "images": (nets.Images, filters(nets.Images)),
    "residual": (nets.Residual, filters(nets.Residual)),
    "tokens": (nets.Tokens, filters(nets.Tokens)),
    "heads": (nets.Attending, heads(nets.Attending, "attention")),
    "windows": (nets.WindowsV2, heads(nets.WindowsV2, "attend")),
}


def trained(world, run, weights):
    """Of each step this rank's part of the loss; and its outputs of the first."""
    state = started(world, run, weights)
    losses, outputs = [], []
    for step in range(run.steps):
        result = state.stepper.run(step)
        losses.append(result.loss)
        with torch.no_grad():
            name = run.plan.graph.outputs[0]
            outputs.append(own_rows(state.model, name, result.outputs[0]).float())
        state.stepper.update()
    return losses, outputs


# Torch's own cosine attention is NaN in fp16: it divides by a norm of zero, as 1e-12 is zero there.
CASES = [(name, "bf16") for name in PLANS] + [(name, "fp16") for name in PLANS if name != "windows"]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "precision"), CASES)
def test_a_rank_without_a_share_trains(on_ranks, tmp_path, name, precision):
    net, plan = PLANS[name]
    torch.manual_seed(nets.SEED)
    module = net()
    run = Experiment(
        plan=plan.with_batch_norm("synchronized"),
        data=Synthetic(samples=24, classes=CLASSES),
        batch_size=9,
        steps=2,
        optimizer=SGD(lr=0.05),
        precision=precision,
    )
    weights = initialize(plan.graph, 0, tmp_path, module=module)
    ranks = on_ranks(3, trained, run, weights)
    alone = Plan.data_parallel(plan.graph, 1).with_batch_norm("synchronized")
    ((losses, outputs),) = on_ranks(1, trained, run.replace(plan=alone), weights)
    for step in range(run.steps):
        assert sum(rank[0][step] for rank in ranks) == pytest.approx(losses[step], rel=0.02)
    found = torch.cat([rank[1][0] for rank in ranks])
    torch.testing.assert_close(found, outputs[0], rtol=0.05, atol=0.05)


@pytest.mark.parametrize("net", [nets.Images, nets.Tokens])
@pytest.mark.parametrize("precision", ["fp64", "bf16", "fp16"])
def test_types_are_those_of_the_whole_model(net, precision):
    graph, cpu = GRAPHS[net], torch.device("cpu")
    dtype = torch.float64 if precision == "fp64" else torch.float32
    found = LayerDtypes(skeleton(graph), graph.inputs, cpu, dtype)
    seen = {}

    class Noting(torch.fx.Interpreter):
        def run_node(self, n):
            value = super().run_node(n)
            if isinstance(value, torch.Tensor):
                seen[n.name] = value.dtype
            return value

    module = net().to(dtype)
    traced = skeleton(graph)
    for path, tensor in [*module.named_parameters(), *module.named_buffers()]:
        owner, _, leaf = path.rpartition(".")
        table = traced.get_submodule(owner)
        getattr(table, "_parameters" if leaf in table._parameters else "_buffers")[leaf] = tensor
    images = torch.randn(2, *graph.input_shape, dtype=dtype)
    half = torch.float16 if precision == "fp16" else torch.bfloat16
    with torch.autocast("cpu", half, enabled=precision != "fp64"):
        Noting(traced).run(images)
        nodes = [layer.node for layer in graph.layers if layer.node in seen]
        assert {node: found.of(node) for node in nodes} == {node: seen[node] for node in nodes}
    assert found.of(graph[graph.outputs[0]].node) == dtype
