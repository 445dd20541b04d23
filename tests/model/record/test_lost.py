"""Models with what a traced copy would lose are refused, with the part and a remedy."""

import types
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests.model.traced import traced
from workbench.model import TraceError, trace


def net():
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 3))


def hooked_gradient(model):
    model[0].weight.register_hook(lambda gradient: 2 * gradient)
    return model


def hooked_sum(model):
    model[2].bias.register_post_accumulate_grad_hook(lambda bias: bias.grad.zero_())
    return model


def hooked_model(model):
    model.register_forward_hook(lambda module, given, result: 2 * result)
    return model


def hooked_backward(model):
    model.register_full_backward_hook(lambda module, given, result: None)
    return model


def replaced_forward(model):
    model[0].forward = types.MethodType(lambda self, x: nn.Linear.forward(self, 2 * x), model[0])
    return model


def compiled_part(model):
    model[0] = torch.compile(model[0], backend="eager")
    return model


def compiled_in_place(model):
    model[2].compile(backend="eager")
    return model


def scripted_part(model):
    model[1] = torch.jit.script(model[1])
    return model


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize(
    ("made", "said"),
    [
        (hooked_gradient, "hooks on the gradient of '0.weight' would be lost"),
        (hooked_sum, "hooks on the gradient of '2.bias' would be lost"),
        (hooked_model, "hooks on the model itself would be lost"),
        (hooked_backward, "backward hooks on the model itself would be lost"),
        (replaced_forward, "the forward method of '0' was replaced in this instance alone"),
        (compiled_part, "the code of '0' is compiled by torch.compile"),
        (compiled_in_place, "the code of '2' is compiled by torch.compile"),
        (torch.compile, "the code of the model itself is compiled by torch.compile"),
        (scripted_part, "the code of '1' is TorchScript"),
    ],
)
def test_refuses(made, said):
    with pytest.raises(TraceError) as caught:
        trace(made(net()), input_shape=(4,))
    assert said in str(caught.value)


@pytest.fixture
def alone(tmp_path):
    """A process group of this process alone."""
    dist.init_process_group("gloo", f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def wrapped_part(model):
    model[0] = DistributedDataParallel(model[0])
    return model


@pytest.mark.filterwarnings("ignore:.*FSDP", "ignore:.*fsdp")
@pytest.mark.parametrize(
    ("wrap", "said"),
    [
        (DistributedDataParallel, "DistributedDataParallel wraps the model itself"),
        (wrapped_part, "DistributedDataParallel wraps '0'"),
        (nn.DataParallel, "DataParallel wraps the model itself"),
        (partial(FullyShardedDataParallel, device_id=torch.device("cpu")), "FullyShardedDataPara"),
        (lambda model: fully_shard(model, mesh=init_device_mesh("cpu", (1,))), "FSDPModule wraps"),
    ],
)
@pytest.mark.usefixtures("alone")
def test_wrappers_that_shard_or_replicate(wrap, said):
    with pytest.raises(TraceError, match=rf"{said}.*give the module inside, model\.module"):
        trace(wrap(net()), input_shape=(4,))


def inside_of(part):
    """A net of which this is a part, between two layers."""
    return nn.Sequential(nn.Linear(4, 4), part, nn.Linear(4, 3))


@pytest.mark.parametrize(
    "hook",
    [
        lambda part: part.register_full_backward_hook(lambda module, given, result: None),
        lambda part: part.register_full_backward_pre_hook(lambda module, result: None),
    ],
)
def test_backward_hooks_are_kept_by_layers_alone(hook):
    block = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    hook(block[0])
    assert trace(inside_of(block), input_shape=(4,))["1.0"].kind == "op"
    hook(block)
    with pytest.raises(TraceError, match="the backward hooks of '1' would be lost"):
        trace(inside_of(block), input_shape=(4,))


def test_a_hook_that_changes_the_module_that_was_given():
    class Gated(nn.Module):
        def __init__(self):
            super().__init__()
            self.block, self.gate, self.seen = inside_of(nn.Tanh()), None, []
            self.block.register_forward_hook(lambda m, given, y: self.seen.append(y))
            self.block.register_forward_hook(lambda m, given, y: setattr(self, "gate", y))

        def forward(self, x):
            y = self.block(x)
            return y if self.gate is None else y * self.gate.mean(1, keepdim=True)

    model = Gated()
    with pytest.raises(
        TraceError, match=r"a hook .* the attribute 'gate', the attribute 'seen' of the"
    ):
        trace(model, input_shape=(4,))
    assert (model.gate, model.seen) == (None, [])


def test_a_hook_that_uses_the_module_that_it_is_called_with():
    block = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    block.register_forward_hook(lambda module, given, y: y * module[0].weight.sum())
    traced(inside_of(block), 4)


class Chosen(nn.Module):
    """Its forward is one of its methods, as timm's partial convolutions have it."""

    def __init__(self, twice):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.forward = self.forward_twice if twice else self.forward_once

    def forward_once(self, x):
        return self.linear(x)

    def forward_twice(self, x):
        return self.linear(self.linear(x))


@pytest.mark.parametrize("twice", [False, True])
def test_a_forward_that_is_another_method_of_its_class(twice):
    graph = trace(inside_of(Chosen(twice)), input_shape=(4,))
    assert sum(layer.name.startswith("1.linear") for layer in graph.layers) == 1 + twice


def test_a_method_of_another_instance_is_refused():
    chosen, other = Chosen(False), Chosen(True)
    chosen.forward = other.forward_once
    with pytest.raises(TraceError, match="the forward method of '1' was replaced"):
        trace(inside_of(chosen), input_shape=(4,))
