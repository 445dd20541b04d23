"""Torchvision's models, split on four engines, against one process."""

import pytest

import workbench as wb
from workbench.bench.exactness import unequal_plans
from workbench.bench.harness.nets import INPUT_SHAPE, CifarNet, SmallVGG
from workbench.model.vision import torchvision

MODELS = ("mobilenet_v3_small", "googlenet")  # `bench exactness` takes more, and larger ones


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    with wb.Cluster(4, directory=tmp_path_factory.mktemp("runs"), timeout=60.0) as cluster:
        yield cluster


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_hybrid_plans_are_exact(four, name):
    graph = wb.trace(name, input_shape=(3, 32, 32))
    groups = wb.Plan.hybrid(graph, world_size=4, group_size=2)
    whole = wb.Plan.hybrid(graph, world_size=4, group_size=4).with_batch_norm("synchronized")
    assert groups.layers
    # In fp32 rounding alone parts the trajectories of deep nets after a few steps: one is enough.
    for plan, precision, steps in ((groups, "fp64", 2), (whole, "fp32", 1)):
        found = four.verify(plan, precision=precision, steps=steps)
        assert found.exact, found
        # Every tensor of the model was compared, on whichever ranks hold it.
        names = {weight.name for layer in graph.layers for weight in layer.weights}
        compared = {d.name for d in found.differences if d.what in ("weight", "buffer")}
        assert names == compared
        assert found.coverage.seen == found.coverage.operations


@pytest.mark.slow
@pytest.mark.parametrize("name", ["CIFAR net", "resnet18"])
def test_unequal_plans_are_exact(four, name):
    """Random and zero shares, by layer, beside unequal rows; 10 rows are a ragged batch of them."""
    module = CifarNet(12) if name == "CIFAR net" else None
    for label, plan in unequal_plans(wb.trace(module or name, input_shape=(3, 32, 32))).items():
        whole = plan.with_batch_norm("synchronized")
        found = four.verify(whole, batch_size=10, steps=1, module=module)
        assert found.exact, (label, found)
        assert found.worst.error <= 1e-10


@pytest.mark.slow
@pytest.mark.parametrize("rounds", ["BK", "B/K"])
def test_a_vgg_is_exact(four, rounds):
    graph = wb.trace(SmallVGG(), input_shape=INPUT_SHAPE)
    plan = wb.Plan.hybrid(graph, world_size=4, group_size=4, rounds=rounds)
    found = four.verify(plan, module=SmallVGG())
    assert found.exact, found


@pytest.mark.slow
def test_a_transformer_is_exact(four):
    """Heads cut equally, unequally, and not at all on one rank of each group."""
    sizes = {"num_layers": 3, "num_heads": 4, "hidden_dim": 64, "mlp_dim": 128, "num_classes": 10}
    module = torchvision().models.VisionTransformer(image_size=32, patch_size=8, **sizes)
    graph = wb.trace(module, input_shape=(3, 32, 32))
    plan = wb.Plan.hybrid(graph, world_size=4, group_size=2)
    for index, shares in enumerate(((3, 1), (0, 1))):
        name = f"encoder.layers.encoder_layer_{index}.self_attention"
        assert plan.layers[name].scheme == "shard_heads"
        plan = plan.with_layer(name, shares=shares)
    found = four.verify(plan, precision="fp64", steps=1, module=module)
    assert found.exact, found
