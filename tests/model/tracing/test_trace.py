"""The graphs of torchvision's models: against known figures, and against the models themselves."""

import os
from fnmatch import fnmatch
from functools import cache

import pytest
import torch
from torch import nn

from tests.model.traced import assert_computes_the_same, traced
from workbench.model import ModelError, build, build_fake, trace
from workbench.model.vision import torchvision

# parameters with 10 classes, images of 32x32 (of torchvision's own modules)
PARAMETERS = {
    "vgg11": 128_807_306,
    "vgg16": 134_301_514,
    "resnet18": 11_181_642,
    "resnet50": 23_528_522,
    "mobilenet_v3_small": 1_528_106,
    "densenet121": 6_964_106,
    "googlenet": 9_960_638,
    "shufflenet_v2_x0_5": 352_042,
    "regnet_x_400mf": 5_098_986,
    "swin_t": 27_527_044,
    "vit_b_16": 85_658_890,
    "convnext_tiny": 27_827_818,
}
SIZES = {"alexnet": 64, "inception_v3": 299, "maxvit_t": 224, "vit_h_14": 224}

# What is others' code once more, deeper: traced where all models are asked for.
DEEPER = [
    *("densenet161", "densenet169", "densenet201"),
    *("efficientnet_b[1-7]", "efficientnet_v2_[ml]"),
    "regnet_?_[0-9]*gf",
]

models = torchvision().models
CLASSIFIERS = [
    name
    for name in models.list_models(module=models)
    if os.environ.get("MODELS") == "all" or not any(fnmatch(name, deep) for deep in DEEPER)
]


@cache
def graph_of(name):
    return trace(name)


def shape_for(name):
    return (3, SIZES.get(name, 32), SIZES.get(name, 32))


def assert_whole(graph):
    """Each tensor of the model is in exactly one layer, under its own name and shape."""
    state = build_fake(graph.source).state_dict()
    weights = [weight for layer in graph.layers for weight in layer.weights]
    assert sorted(weight.name for weight in weights) == sorted(state)
    for weight in weights:
        tensor = state[weight.name]
        assert weight.shape == tuple(tensor.shape)
        assert weight.dtype == str(tensor.dtype).removeprefix("torch.")
        assert weight.persistent
        assert not weight.aliases


@pytest.mark.parametrize("name", ["vgg11", "resnet18", "mobilenet_v3_small", "vit_b_16"])
def test_figures(name):
    graph = graph_of(name)
    assert graph.parameters == PARAMETERS[name]
    assert graph.num_classes == 10
    assert graph[graph.outputs[0]].output_shape == (10,)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["resnet18", "regnet_x_400mf", "swin_t", "vit_b_16"])
def test_every_tensor_is_in_one_layer(name):
    assert_whole(graph_of(name))


@pytest.mark.slow
@pytest.mark.parametrize("name", CLASSIFIERS)
def test_classifiers_are_traced_and_compute_the_same(name):
    graph = trace(name, input_shape=shape_for(name))
    assert graph[graph.outputs[0]].output_shape == (10,)
    assert graph.parameters == PARAMETERS.get(name, graph.parameters)
    assert_whole(graph)
    if graph.parameters < 10_000_000:
        assert_computes_the_same(graph, build(graph.source), rows=2)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["squeezenet1_1", "shufflenet_v2_x0_5", "mobilenet_v3_small"])
def test_the_traced_model_computes_the_same(name):
    graph = trace(name, input_shape=(3, 64, 64))
    assert_computes_the_same(graph, build(graph.source))


def test_vgg11_layer_by_layer():
    graph = graph_of("vgg11")
    assert len(graph.layers) == 30
    first, flatten, linear = graph["features.0"], graph["flatten"], graph["classifier.0"]
    assert (first.kind, first.inputs, first.target) == ("conv2d", ("input",), "torch.nn.Conv2d")
    assert (first.input_shape, first.output_shape) == ((3, 32, 32), (64, 32, 32))
    assert first.flops == 2 * 3 * 3 * 3 * 64 * 32 * 32
    assert first.activation_bytes == 4 * 64 * 32 * 32
    assert first.node == "features_0"
    assert (flatten.kind, flatten.inputs, flatten.output_shape) == (
        "flatten",
        ("avgpool",),
        (25088,),
    )
    assert (linear.kind, linear.flops) == ("linear", 2 * 25088 * 4096)
    assert [weight.name for weight in linear.weights] == [
        "classifier.0.weight",
        "classifier.0.bias",
    ]
    assert graph.outputs == ("classifier.6",)
    assert graph.source.arguments == (("num_classes", 10),)


def test_batch_norm_s_statistics_are_weights_that_are_not_trained():
    norm = graph_of("resnet18")["bn1"]
    assert [(w.name, w.dtype, w.trainable) for w in norm.weights] == [
        ("bn1.weight", "float32", True),
        ("bn1.bias", "float32", True),
        ("bn1.running_mean", "float32", False),
        ("bn1.running_var", "float32", False),
        ("bn1.num_batches_tracked", "int64", False),
    ]


@pytest.mark.slow
def test_auxiliary_heads_follow_the_prediction():
    assert graph_of("googlenet").outputs == ("fc", "aux2.fc2", "aux1.fc2")
    assert trace("googlenet", aux_logits=False).outputs == ("fc",)


def test_attention_is_counted():
    graph = graph_of("vit_b_16")
    tokens, width = 5, 768
    attention = graph["encoder.layers.encoder_layer_0.self_attention"]
    projections = 2 * 4 * tokens * width * width
    assert attention.flops == projections + 2 * 2 * tokens * tokens * width
    assert attention.output_shape == (tokens, width)


def test_positions_and_class_token_are_read_directly():
    graph = graph_of("vit_b_16")
    token = graph["class_token"]
    assert (token.kind, token.rows, token.output_shape) == ("parameter", 0, (1, 1, 768))
    assert graph["encoder.pos_embedding"].weights[0].name == "encoder.pos_embedding"
    assert graph["expand"].rows == 1  # of the token, one for each sample


@pytest.mark.slow
def test_sizes_that_do_not_depend_on_the_batch_are_numbers():
    kinds = [layer.kind for layer in graph_of("shufflenet_v2_x0_5").layers]
    assert kinds.count("size") == 32  # x.size() and its first element, for each of 16 shuffles
    assert "size" not in [layer.kind for layer in graph_of("swin_t").layers]


def test_tracing_takes_no_memory(allocated):
    assert allocated(lambda: torch.empty(1_000_000)) >= 4_000_000
    trace("vgg11")
    assert allocated(lambda: trace("vgg11")) < 1_000_000


def test_the_same_model_is_the_same_graph():
    first, second = graph_of("resnet18"), trace("resnet18")
    assert first == second
    assert first.fingerprint == second.fingerprint
    assert first.fingerprint != trace("resnet18", num_classes=9).fingerprint


@pytest.mark.slow
def test_a_module_and_its_name_have_the_same_layers():
    module = models.resnet18(num_classes=10)
    assert trace(module).layers == graph_of("resnet18").layers


def test_grouped_convolutions():
    graph = graph_of("mobilenet_v3_small")
    depthwise = [layer for layer in graph.layers if layer.kind == "conv2d" and layer.groups > 1]
    assert depthwise
    assert all(layer.groups == layer.input_shape[0] for layer in depthwise)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (dict(input_shape=(3, 0, 32)), "without the batch, such as"),
        (dict(input_shape=()), "without the batch, such as"),
        (dict(depth=3), "vgg11 cannot be built"),
    ],
)
def test_bad_arguments(given, message):
    with pytest.raises(ModelError, match=message):
        trace("vgg11", **given)


def test_a_module_takes_no_arguments_of_a_builder():
    with pytest.raises(ModelError, match="Linear is built already: dropout cannot be given"):
        trace(nn.Linear(2, 2), input_shape=(2,), dropout=0.1)


def test_a_class_is_not_an_instance():
    with pytest.raises(ModelError, match="give an instance, not the class"):
        trace(nn.Linear, input_shape=(2,))


def test_a_graph_of_one_layer():
    graph = traced(nn.Sequential(nn.Linear(3, 2)), 3)
    assert [layer.name for layer in graph.layers] == ["0"]
    assert graph.num_classes == 2
