"""Holds nets that are split under any plan against one process."""

import pytest
import torch.nn.functional as F
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from tests.layers import nets
from tests.layers.drawn import shares
from workbench.layers.context import BatchContext
from workbench.plan.placement import Shard, apportion
from workbench.plan.plan import Plan
from workbench.plan.rules import schemes_of
from workbench.train.masks import place_dropout


def whole(net, graph, count):
    """Outputs, mean loss, gradients and buffers of one process with the same masks."""
    model = nets.made(net)
    context = BatchContext(0, (count,), seed=nets.SEED)
    place_dropout(model, graph, context)
    images, labels = nets.batch(net, count)
    outputs = model(images)
    loss = F.cross_entropy(outputs, labels)
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    return outputs.detach(), loss.item(), gradients, dict(model.named_buffers())


def check(on_ranks, net, plan, rows):
    """Every rank's pieces equal the slices of what one process computes."""
    count = sum(rows)
    outputs, loss, gradients, buffers = whole(net, plan.graph, count)
    answers = on_ranks(plan.world_size, nets.split, plan, net, rows)
    assert sum(answer[1] for answer in answers) == pytest.approx(loss, rel=1e-12)
    for rank, (mine, _, grads, stats, _) in enumerate(answers):
        assert_close(mine, outputs.narrow(0, *Shard(0, rows).span(rank)), rtol=1e-9, atol=1e-11)
        for name, got in {**grads, **stats}.items():
            expected = nets.piece_of(plan, name, {**gradients, **buffers}[name], rank)
            assert_close(got, expected, rtol=1e-9, atol=1e-11, msg=lambda m, n=name: f"{n}: {m}")
    return answers


@st.composite
def plans(draw, graph):
    """Any scheme, group size and shares for every layer that can be split, on 1 to 4 ranks."""
    world = draw(st.integers(1, 4))
    plan = Plan.data_parallel(graph, world).with_batch_norm("synchronized")
    sizes = [k for k in range(1, world + 1) if world % k == 0]
    for layer in graph.layers:
        if not schemes_of(layer) or layer.name in graph.shares_weights:
            continue
        scheme = draw(st.sampled_from(schemes_of(layer)))
        k = 1 if scheme == "replicate" else draw(st.sampled_from(sizes))
        cut_by = draw(shares(k)) if scheme.startswith("shard") and draw(st.booleans()) else None
        plan = plan.with_layer(layer.name, scheme=scheme, group_size=k, shares=cut_by)
    return plan, apportion(draw(st.integers(4, 7)), draw(shares(world)))


EXAMPLES = settings(
    max_examples=30,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
