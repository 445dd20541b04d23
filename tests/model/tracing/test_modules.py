"""Modules of a user's own: what is traced, and how it is described."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations

from tests.model.traced import assert_computes_the_same, calling, traced
from workbench.model import skeleton, trace
from workbench.plan.plans.plan import Plan

IMAGE = (3, 8, 8)


def kinds(graph):
    return {layer.name: layer.kind for layer in graph.layers}


def rows(graph):
    return {layer.name: layer.rows for layer in graph.layers}


def names(graph):
    return [weight.name for layer in graph.layers for weight in layer.weights]


class Block(nn.Module):
    """Reads shapes, decides by them, loops over them, and reads buffers and parameters."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 3, padding=1)
        self.register_buffer("scale", torch.tensor(2.0), persistent=False)
        self.shift = nn.Parameter(torch.ones(6, 1, 1))
        self.head = nn.Linear(6 * 64, 10)

    def forward(self, x):
        batch, channels, _, width = x.shape
        assert channels == 3
        if x.ndim == 4 and len(x.shape) == x.dim():
            x = self.conv(x)
        for _ in range(x.size(1) // 3):
            x = x * self.scale
        x = F.relu(x + self.shift) + torch.arange(width, device=x.device)
        return self.head(x.view(batch, -1))


def test_shapes_are_known_while_tracing():
    graph = traced(Block(), *IMAGE)
    assert [layer.name for layer in graph.layers if layer.target == "operator.mul"] == [
        "mul",
        "mul_1",
    ]
    assert names(graph) == [
        "conv.weight",
        "conv.bias",
        "scale",
        "shift",
        "head.weight",
        "head.bias",
    ]
    assert [w.persistent for w in graph["scale"].weights] == [False]
    assert "size" in kinds(graph).values()  # the device of arange


def test_a_view_of_all_features_is_a_flatten():
    graph = traced(Block(), *IMAGE)
    flatten = graph["flatten"]
    assert (flatten.kind, flatten.target) == ("flatten", "torch.flatten")
    assert graph[flatten.inputs[0]].output_shape == (6, 8, 8)


def test_the_module_is_left_as_it_is():
    module = Block().eval().double()
    module.conv.weight.grad = torch.ones_like(module.conv.weight)
    before = {name: (t, t._version) for name, t in module.state_dict(keep_vars=True).items()}
    trace(module, input_shape=IMAGE)
    assert not module.training
    assert not module.conv.training
    assert module.conv.weight.grad is not None
    for name, tensor in module.state_dict(keep_vars=True).items():
        assert tensor is before[name][0]
        assert tensor._version == before[name][1]


def test_precision_and_mode_do_not_matter():
    graph = trace(Block(), input_shape=IMAGE)
    assert trace(Block().double(), input_shape=IMAGE) == graph
    assert trace(Block().bfloat16().eval(), input_shape=IMAGE) == graph
    assert trace(Block().to("meta"), input_shape=IMAGE) == graph
    assert {w.dtype for layer in graph.layers for w in layer.weights} == {"float32"}


def test_rows_of_windows():
    def windows(self, x):
        batch, channels, height, width = x.shape
        x = x.view(batch, channels, height // 4, 4, width // 4, 4).permute(0, 2, 4, 1, 3, 5)
        return F.gelu(x.reshape(-1, channels, 4, 4)).reshape(batch, -1)

    graph = traced(calling(windows), *IMAGE)
    assert rows(graph)["gelu"] == 4
    assert graph["gelu"].output_shape == (3, 4, 4)
    assert graph["gelu"].activation_bytes == 4 * 4 * 3 * 4 * 4
    assert rows(graph)["reshape_1"] == 1


def test_values_made_in_forward():
    def made(self, x):
        n = x.shape[0]
        noise = torch.zeros((n, 1)) + x.new_ones(n, 1) + torch.arange(5)
        return x.flatten(1)[:, :5] + noise

    graph = traced(calling(made), *IMAGE)
    assert rows(graph)["zeros"] == 1
    assert rows(graph)["new_ones"] == 1
    assert rows(graph)["arange"] == 0


def test_a_module_called_twice_is_one_owner():
    def twice(self, x):
        return self.fc(self.fc(x))

    graph = traced(calling(twice, fc=nn.Linear(4, 4)), 4)
    first, second = graph.layers
    assert (first.name, second.name) == ("fc", "fc@2")
    assert (first.shared, second.shared) == ("", "fc")
    assert [w.name for w in first.weights] == ["fc.weight", "fc.bias"]
    assert second.weights == ()
    assert graph.parameters == 20


def test_tied_weights_have_aliases():
    def forward(self, x):
        return self.decode(self.encode(x))

    module = calling(forward, encode=nn.Linear(4, 4), decode=nn.Linear(4, 4))
    module.decode.weight = module.encode.weight
    graph = traced(module, 4)
    assert graph["encode"].weights[0].aliases == ("decode.weight",)
    assert graph["decode"].shared == "encode"
    assert [w.name for w in graph["decode"].weights] == ["decode.bias"]
    assert graph.parameters == 16 + 4 + 4


def test_a_weight_that_is_also_read_directly_stays_with_its_layer():
    def forward(self, x):
        return F.linear(self.fc(x), self.fc.weight)

    graph = traced(calling(forward, fc=nn.Linear(4, 4)), 4)
    assert [w.name for w in graph["fc"].weights] == ["fc.weight", "fc.bias"]
    read = graph["fc.weight"]
    assert (read.kind, read.weights, read.shared) == ("parameter", (), "fc")


def test_parameters_that_are_never_reached_are_kept():
    def forward(self, x):
        return self.fc(x)

    graph = traced(calling(forward, fc=nn.Linear(4, 4), spare=nn.Linear(2, 2)), 4)
    assert kinds(graph) == {"fc": "linear", "spare.weight": "parameter", "spare.bias": "parameter"}
    assert graph.consumers["spare.weight"] == ()
    assert skeleton(graph).spare.weight.shape == (2, 2)


def test_frozen_parameters_are_not_trained():
    module = nn.Sequential(nn.Linear(4, 4))
    module[0].weight.requires_grad_(False)
    graph = traced(module, 4)
    assert [(w.trainable, w.frozen) for w in graph["0"].weights] == [(False, True), (True, False)]
    held = dict(skeleton(graph).named_parameters())
    assert {name: p.requires_grad for name, p in held.items()} == {
        "0.weight": False,
        "0.bias": True,
    }


def test_a_function_s_name_gives_way_to_a_module_s():
    def forward(self, x):
        return self.flatten(torch.flatten(x, 1))

    graph = traced(calling(forward, flatten=nn.Linear(192, 2)), *IMAGE)
    assert kinds(graph) == {"flatten_": "flatten", "flatten": "linear"}
    assert {node.name for node in skeleton(graph).graph.nodes} >= {
        each.node for each in graph.layers
    }


def test_wrapped_functions_are_one_operation():
    graph = traced(Wrapped(), *IMAGE)
    assert kinds(graph) == {"double": "op", "flatten": "flatten"}


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


@torch.fx.wrap
def double(x):
    return Double.apply(x)


class Wrapped(nn.Module):
    def forward(self, x):
        return double(x).flatten(1)


def test_a_change_in_place_is_read_by_what_follows():
    def forward(self, x):
        x = x * 2
        x.add_(1)
        self.relu(x)
        return x.flatten(1)

    graph = traced(calling(forward, relu=nn.ReLU(inplace=True)), *IMAGE)
    assert [layer.inputs for layer in graph.layers] == [("input",), ("mul",), ("add_",), ("relu",)]


def test_augmented_assignment_changes_every_name_of_a_tensor():
    def forward(self, x):
        x = x * 2
        other = x
        x += 1
        x *= other.flatten(1).shape[1]
        return (x - other).flatten(1) + torch.mul(x, 2, out=x).flatten(1)

    def counted(self, x):
        n = x.shape[0]
        rows = n
        n += 0
        return x.reshape(rows, n * 192 // n)

    with torch.no_grad():
        traced(calling(forward), *IMAGE)
    traced(calling(counted), *IMAGE)


def test_recurrent_layers_with_the_batch_first():
    def forward(self, x):
        return self.lstm(x)[0][:, -1]

    lstm = nn.LSTM(8, 4, batch_first=True)
    graph = traced(calling(forward, lstm=lstm), 5, 8)
    assert graph["lstm"].kind == "op"
    assert graph["lstm"].output_shape == (5, 4)
    least = (graph["lstm"].least_rows, graph["lstm"].least_rows_half)
    assert least == (0, int(runs_in_bf16(lstm, torch.randn(2, 5, 8))))


def runs_in_bf16(module, x):
    """Torch's LSTM does not, on a processor without AVX-512."""
    try:
        with torch.autocast("cpu", torch.bfloat16):
            module(x)
    except RuntimeError:
        return False
    return True


def wide_without_rows(x, half):
    """As torch's LSTM in bf16: under this autocast, the type of no rows is not that of some."""
    is_half = torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") == half
    return x.sin().to(half) if is_half and len(x) else x.sin()


@torch.fx.wrap
def wide_in_bf16(x):
    return wide_without_rows(x, torch.bfloat16)


@torch.fx.wrap
def wide_in_fp16(x):
    return wide_without_rows(x, torch.float16)


@torch.fx.wrap
def not_in_fp16(x):
    if torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") == torch.float16:
        raise RuntimeError("no kernel")
    return x.sin()


@pytest.mark.parametrize(
    ("forward", "least"),
    [
        (lambda self, x: self.head(wide_in_bf16(x)), 1),
        (lambda self, x: self.head(wide_in_fp16(x)), 1),
        (lambda self, x: self.head(not_in_fp16(x)), 0),
        (lambda self, x: self.head(torch.sin(x)), 0),
    ],
    ids=["bf16", "fp16", "no kernel in fp16", "neither"],
)
def test_a_type_that_hangs_on_rows_is_seen_in_either_half(forward, least):
    """What one of them has no kernel for is not known of it."""
    graph = trace(calling(forward, head=nn.Linear(6, 3)), input_shape=(6,))
    (found,) = [layer for layer in graph.layers if layer.name != "head"]
    assert (found.least_rows, found.least_rows_half) == (0, least)


def test_parametrized_layers_are_traced_inside():
    def forward(self, x):
        return self.conv(x).flatten(1)

    conv = parametrizations.weight_norm(nn.Conv2d(3, 4, 3))
    graph = trace(calling(forward, conv=conv), input_shape=IMAGE)
    assert graph["conv2d"].kind == "op"
    assert graph.parameters == sum(p.numel() for p in conv.parameters())
    assert skeleton(graph) is not None


def test_optional_inputs_keep_their_defaults():
    def forward(self, x, mask=None):
        return x.flatten(1) if mask is None else x * mask

    assert kinds(traced(calling(forward), *IMAGE)) == {"flatten": "flatten"}


def test_parts_can_be_looped_over():
    def forward(self, x):
        first, *rest = x.flatten(1).chunk(3, dim=1)
        return torch.cat([part * 2 for part in rest] + [first], dim=1)

    graph = traced(calling(forward), *IMAGE)
    assert [layer.kind for layer in graph.layers].count("elementwise") == 2


def test_the_skeleton_travels_with_the_graph():
    """Rebuilt from bytes, it needs neither the module nor what `torch.fx.wrap` marked."""
    module = Block()
    graph = trace(module, input_shape=IMAGE)
    assert graph.source.skeleton is not None
    first = skeleton(graph)
    assert all(tensor.is_meta for tensor in [*first.parameters(), *first.buffers()])
    assert first.training
    assert {layer.node for layer in graph.layers} <= {node.name for node in first.graph.nodes}
    assert_computes_the_same(graph, module)
    assert skeleton(graph) is not first


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mobilenet_v3_small", "googlenet"])
def test_so_does_that_of_a_model_with_a_name(name):
    """Without it each engine would trace the model anew, in training and in evaluation."""
    graph = trace(name)
    assert graph.source.skeleton
    as_text = Plan.from_toml(Plan.data_parallel(graph, 1).to_toml()).graph
    assert as_text.source.skeleton is None
    for evaluating in {False, graph.evaluation is not None}:
        held, again = (skeleton(each, evaluating=evaluating) for each in (graph, as_text))
        assert [n.format_node() for n in held.graph.nodes] == [
            n.format_node() for n in again.graph.nodes
        ]
        assert held.state_dict().keys() == again.state_dict().keys()


@pytest.mark.slow
def test_deep_models_travel_too():
    """Python's recursion does not limit them, as it would where nodes are pickled in a chain."""
    module = nn.Sequential(*(nn.ReLU() for _ in range(600)), nn.Linear(2, 2))
    assert len(skeleton(trace(module, input_shape=(2,))).graph.nodes) == 603


def test_lines_of_inference():
    """Nobody counts what is written to tensors that are made there."""

    def forward(self, x):
        with torch.inference_mode():
            scale = torch.tanh(x)
        return self.block(x * scale)

    graph = traced(calling(forward, block=nn.Linear(4, 3)), 4)
    assert "no_grad_tanh" in [layer.name for layer in graph.layers]


def test_weights_by_name():
    def forward(self, x):
        x = F.linear(x, self.get_parameter("layer.weight"), self.get_submodule("layer").bias)
        return x * self.get_buffer("scale")

    module = calling(forward, layer=nn.Linear(4, 3))
    module.register_buffer("scale", torch.rand(3))
    traced(module, 4)
