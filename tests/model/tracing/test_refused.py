"""What cannot be traced: each case has one error that says where and what to do."""

import re
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.checkpoint import checkpoint

from tests.model.traced import calling
from tests.model.tracing.test_modules import Double
from workbench.model import TraceError, trace

IMAGE = (3, 8, 8)


def refusal(forward, *, shape=IMAGE, **attributes):
    """The reason that is given, without the line of the model's code."""
    with pytest.raises(TraceError) as caught:
        trace(calling(forward, **attributes), input_shape=shape)
    return str(caught.value).split("\n")[0]


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (lambda x: x - x.mean(0), "mean has lost the batch"),
        (lambda x: x - x.mean(0, keepdim=True), "mean has lost the batch"),
        (lambda x: x / x.max(), "max has lost the batch"),
        (lambda x: x.flatten(1) @ x.flatten(1).t(), "matmul has the batch elsewhere"),
        (lambda x: x.permute(1, 0, 2, 3), "permute has the batch elsewhere"),
        (lambda x: x.reshape(3, -1), "the batch elsewhere"),
        (lambda x: x[0], "getitem has lost the batch"),
        (lambda x: x[::2], "getitem has"),
        (lambda x: x[torch.rand(x.shape[0]).long()], "where other samples, or fewer"),
        (lambda x: x[torch.randperm(x.shape[0])], "sort random numbers"),
        (lambda x: x.flatten(1).softmax(0), "softmax mixes samples"),
        (lambda x: x.cumsum(-4), "cumsum mixes samples"),
        (lambda x: x.flip(0), "on the sample's place"),
        (lambda x: torch.cat([x, x]), "cat mixes samples"),
        (lambda x: x / x.shape[0], "number that depends on the batch size"),
        (lambda x: F.batch_norm(x, None, None, training=True), "batch statistics"),
        (lambda x: F.adaptive_avg_pool2d(x, 1).squeeze(), "name the dimensions"),
        (lambda x: x.flatten(1).repeat(2, 1), "repeat mixes samples"),
        (lambda x: F.normalize(x, dim=0), "normalize mixes samples"),
        (lambda x: [row for row in x], "loop over the batch"),
        (lambda x: x.roll(1), "roll mixes samples"),
        (lambda x: x.roll(1, 0), "roll mixes samples"),
        (lambda x: x * torch.full((1,), x.shape[0]), "full makes a tensor of the batch's size"),
        (lambda x: x * torch.ones((x.shape[0] // 4, 1)), "of the batch's size"),
    ],
)
def test_samples_are_not_mixed(call, reason):
    assert reason in refusal(lambda self, x: call(x).flatten(1))


class Centred(nn.Module):
    def forward(self, x):
        return x - x.mean(0)


def test_a_module_that_mixes_samples_is_refused_at_its_line():
    """It may be an operation as a whole, and is tried as one: that it mixes them is seen then."""
    text = refusal(lambda self, x: self.block(x), block=Centred())
    assert "mean has lost the batch" in text


def test_attention_to_other_samples():
    attend = nn.MultiheadAttention(8, 2)  # torch's default: tokens come first
    text = refusal(lambda self, x: self.block(x, x, x)[0], shape=(5, 8), block=attend)
    assert "batch_first=True" in text


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (nn.Softmax(0), "Softmax mixes samples"),
        (nn.SyncBatchNorm(3), 'batch_norm="synchronized"'),
        (nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0), "batch_first=True"),
        (nn.TransformerEncoderLayer(8, 2, 16), "whose first dimension is the batch"),
        (nn.LSTM(8, 4), "batch_first=True"),
        (nn.Conv2d(3, 4, 9), "Kernel size can't be greater"),
        (nn.LazyLinear(3), "run the module once on a batch"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_layers(layer, reason):
    shape = IMAGE if isinstance(layer, nn.Conv2d | nn.SyncBatchNorm) else (5, 8)
    text = refusal(lambda self, x: self.block(x), shape=shape, block=layer)
    assert reason in text


@torch.fx.wrap
def clamped(x):
    return x.clamp(max=1.0) if bool((x > 2).any()) else x


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (lambda x: x * 2 if x.sum() > 0 else x, "use torch.where"),
        (lambda x: x * 2 if x.shape[0] > 3 else x, "the size of the batch"),
        (lambda x: x * 2 if x.shape[0] // 4 == 0 else x, "the size of the batch"),
        (lambda x: x[x > 0], "depends on the values of a tensor"),
        (lambda x: clamped(x), "also in a function marked by torch.fx.wrap: use torch.where"),
        (lambda x: x.new_ones(torch.Size([x.shape[0], 1])), r"x.new_zeros\(\(n, 3\)\)"),
        (lambda x: x.numpy(), "numpy"),
        (lambda x: Double.apply(x), "backward pass of a torch.autograd.Function"),
        (lambda x: x.__setitem__(0, 1), "setitem gives a sample other results"),
    ],
)
def test_what_is_decided_when_it_runs(call, reason):
    assert re.search(reason, refusal(lambda self, x: call(x.flatten(1))))


@pytest.mark.parametrize(
    ("output", "reason"),
    [
        (lambda x: {"scores": x}, "a dict with 'scores'"),
        (lambda x: (x, {"scores": x}), "a tuple of Node|return the predictions"),
        (lambda x: (x, object()), "an object of builtins.object is returned"),
        (lambda x: None, "returns nothing"),
        (lambda x: x.shape[0], "return the predictions"),
        (lambda x: x.reshape(-1, 2), "96 rows"),
    ],
)
def test_outputs(output, reason):
    assert re.search(reason, refusal(lambda self, x: output(x.flatten(1))))


def in_half(self, x):
    with torch.autocast("cpu", torch.bfloat16):
        return x.flatten(1)


def test_a_mode_that_would_be_lost():
    assert "torch.autocast in forward would be lost" in refusal(in_half)


def test_tracing_in_such_a_mode_is_no_matter():
    with torch.no_grad():
        assert trace(nn.Linear(2, 3), input_shape=(2,)).num_classes == 3


def test_hooks_on_the_model_itself():
    module = nn.Linear(2, 3)
    module.register_forward_hook(lambda module, args, output: output * 2)
    with pytest.raises(TraceError, match="hooks on the model itself"):
        trace(module, input_shape=(2,))


def test_an_output_that_is_the_input():
    assert "the model returns 'x'" in refusal(lambda self, x: x, shape=(4,))


def test_several_inputs_are_named():
    text = refusal(lambda self, image, mask: image * mask)
    assert "forward takes 2 inputs (image, mask)" in text


def test_a_tensor_that_is_no_buffer():
    text = refusal(lambda self, x: x.flatten(1) * self.scale, scale=torch.ones(1))
    assert 'self.register_buffer("name", tensor)' in text


def test_a_module_that_is_no_submodule():
    text = refusal(lambda self, x: self.layers[0](x), layers=[nn.Linear(8, 3)])
    assert "hold such modules in nn.ModuleList" in text


def test_state_that_the_model_changes_itself():
    module = calling(count_calls)
    module.register_buffer("count", torch.zeros(()))
    with pytest.raises(TraceError, match="forward writes into 'count'"):
        trace(module, input_shape=IMAGE)


def count_calls(self, x):
    self.count.add_(1)
    return x.flatten(1)


def test_state_that_is_assigned():
    for count in (assign_calls, add_calls):
        module = calling(count)
        module.register_buffer("count", torch.zeros(()))
        with pytest.raises(TraceError, match="forward assigns another tensor to 'count'"):
            trace(module, input_shape=IMAGE)


def test_what_is_made_once_is_there_after_a_call():
    """As ConViT of timm makes the indices of its positions."""
    module = calling(make_once)
    module.register_buffer("places", torch.zeros(0))
    with pytest.raises(TraceError, match=r"to 'places'.*made once.*call model\(x\) first"):
        trace(module, input_shape=IMAGE)
    module(torch.zeros(2, *IMAGE))
    assert trace(module, input_shape=IMAGE)["mul"].output_shape == IMAGE


def test_a_layer_that_forward_makes():
    class Late(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = None

        def forward(self, x):
            self.head = self.head or nn.Linear(x.shape[1], 3)
            return self.head(x)

    model = Late()
    with pytest.raises(TraceError, match=r"makes the layer 'head'.*__init__, or call model\(x\)"):
        trace(model, input_shape=(4,))
    model(torch.zeros(2, 4))
    assert trace(model, input_shape=(4,)).outputs == ("head",)


def make_once(self, x):
    if len(self.places) != x.shape[-1]:
        self.places = torch.arange(x.shape[-1])
    return x * self.places


def assign_calls(self, x):
    self.count = self.count + 1
    return x.flatten(1) / self.count


def add_calls(self, x):
    self.count += 1
    return x.flatten(1) / self.count


def test_a_norm_that_writes_the_statistics_of_its_rows():
    norm = nn.InstanceNorm2d(3, track_running_stats=True)
    with pytest.raises(TraceError, match=r"'0': forward writes into '0\.running_mean'"):
        trace(nn.Sequential(norm, nn.Flatten()), input_shape=IMAGE)
    plain = nn.Sequential(nn.InstanceNorm2d(3), nn.Flatten())
    assert trace(plain, input_shape=IMAGE).layers[0].kind == "op"


def test_a_state_dict_of_its_own_making():
    class Extra(nn.Linear):
        def get_extra_state(self):
            return 1

    with pytest.raises(TraceError, match=r"differs .* in \['_extra_state'\]"):
        trace(Extra(4, 4), input_shape=(4,))


class Inner(nn.Module):
    def forward(self, x):
        return x - x.mean(0)  # the line to be found


class Outer(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(nn.ReLU(), Inner())

    def forward(self, x):
        return self.blocks(x).flatten(1)


def test_the_error_names_module_and_line():
    source = Path(__file__).read_text().splitlines()
    line = 1 + next(n for n, text in enumerate(source) if "# the line to be found" in text)
    with pytest.raises(TraceError) as caught:
        trace(Outer(), input_shape=IMAGE)
    text = str(caught.value)
    assert text.startswith("Outer cannot be traced in 'blocks.1': ")
    assert f"{__file__}:{line}, in forward: return x - x.mean(0)" in text


def test_a_model_that_cannot_take_the_image():
    with pytest.raises(TraceError, match=r"alexnet cannot be traced in 'features.12': .*too small"):
        trace("alexnet", input_shape=(3, 32, 32))


def test_nothing_is_printed(capfd):
    with pytest.raises(TraceError):
        trace("alexnet", input_shape=(3, 32, 32))
    assert capfd.readouterr() == ("", "")


def test_after_a_failure_everything_works_as_before():
    refusal(lambda self, x: x - x.mean(0))
    assert nn.Linear(2, 3)(torch.ones(1, 2)).shape == (1, 3)
    assert trace(nn.Linear(2, 3), input_shape=(2,)).num_classes == 3


def test_a_submodule_with_a_name_that_torch_fx_uses_itself():
    said = refusal(lambda self, x: self.code(x), code=nn.Flatten())
    assert "a submodule named code" in said


@cache
def remembered(size):
    return torch.ones(size, size).tril()


def test_a_value_that_an_earlier_trace_has_left():
    said = refusal(lambda self, x: x @ remembered(8).to(x))
    assert "it uses a value of another trace" in said
    assert "self.register_buffer" in said
    remembered.cache_clear()


def constrains(self, x):
    self.block.weight.data = torch.renorm(self.block.weight.data, p=2, dim=0, maxnorm=0.3)
    return self.block(x)


def replaces(self, x):
    x = self.block(x)
    x.data = x.data.clamp(-0.3, 0.3)
    return x


def unlearns(self, x):
    x = self.block(x)
    x.requires_grad = False
    return x


@pytest.mark.parametrize(
    ("forward", "name"),
    [
        (constrains, "block_weight.data"),
        (replaces, "block.data"),
        (unlearns, "block.requires_grad"),
    ],
)
def test_attributes_of_tensors_that_are_assigned(forward, name):
    said = refusal(forward, shape=(4,), block=nn.Linear(4, 3))
    assert f"the assignment to {name} would be lost" in said
    assert "w = constrain(self.weight)" in said


@pytest.mark.parametrize(
    ("decides", "reason"),
    [
        (lambda x: float(x.mean()), "mean has lost the batch"),
        (lambda x: 2.0 if x.shape[0] > 7 else 3.0, "a decision depends on"),
        (lambda x: float(x.shape[0]), "a number of Python.s is made"),
    ],
)
def test_what_the_model_catches_is_refused_still(decides, reason):
    """It would take another way when it runs, where nothing is raised."""

    def forward(self, x):
        x = self.block(x)
        try:
            scale = decides(x)
        except Exception:
            scale = 1.0
        return x * scale

    inner = calling(forward, block=nn.Linear(4, 3))
    with pytest.raises(TraceError, match=f"cannot be traced in '0': .*{reason}"):
        trace(nn.Sequential(inner), input_shape=(4,))


def test_a_generator_of_its_own():
    def forward(self, x):
        return self.block(x) + torch.randn(3, generator=self.generator)

    said = refusal(forward, shape=(4,), block=nn.Linear(4, 3), generator=torch.Generator())
    assert "leave generator= out" in said


def hooks(x):
    if x.requires_grad:
        x.register_hook(lambda gradient: gradient * 0.1)
    return x


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (hooks, "reads block.requires_grad, .* self.training"),
        (lambda x: x * 2 if x.grad_fn is not None else x, "reads block.grad_fn"),
        (lambda x: x if x.is_leaf else x * 2, "reads block.is_leaf"),
        (lambda x: x.register_hook(print) and x, "block.register_hook would be lost"),
        (lambda x: x.retain_grad() or x, "block.retain_grad would be lost"),
    ],
)
def test_what_is_of_gradients(call, reason):
    said = refusal(lambda self, x: call(self.block(x)), shape=(4,), block=nn.Linear(4, 3))
    assert re.search(reason, said)


def test_what_is_known_of_parameters_and_inputs():
    def forward(self, x):
        scale = 2 if self.block.weight.requires_grad and self.block.weight.is_leaf else 3
        return self.block(x) * (scale if not x.requires_grad else 4)

    block = nn.Linear(4, 3)
    last = trace(calling(forward, block=block), input_shape=(4,))
    block.requires_grad_(False)
    other = trace(calling(forward, block=block), input_shape=(4,))
    assert last.fingerprint != other.fingerprint


@pytest.mark.parametrize(
    ("forward", "remedy"),
    [
        (lambda self, x: self.normed(x), r"layer.eval\(\)"),
        (
            lambda self, x: torch.distributions.Normal(x, x.exp()).rsample(),
            r"mean \+ deviation \* torch.randn_like\(deviation\)",
        ),
        (lambda self, x: checkpoint(self.inside, x, use_reentrant=True), "use_reentrant=False"),
        (lambda self, x: torch.vmap(lambda row: row / row.norm())(x), "torch.fx.wrap"),
    ],
)
def test_refusals_of_torch_s_own_helpers_say_what_works(forward, remedy):
    layers = dict(inside=nn.Linear(4, 4), normed=spectral_norm(nn.Linear(4, 4)))
    with pytest.raises(TraceError, match=remedy):
        trace(calling(forward, **layers), input_shape=(4,))


@torch.fx.wrap
def by_row(x):
    return torch.vmap(lambda row: row / row.norm())(x)


def test_what_they_say_works():
    def forward(self, x):
        x = checkpoint(self.inside, self.normed(by_row(x)), use_reentrant=False)
        return x + x.exp() * torch.randn_like(x)

    layers = dict(inside=nn.Linear(4, 4), normed=spectral_norm(nn.Linear(4, 4)).eval())
    assert trace(calling(forward, **layers), input_shape=(4,)).num_classes == 4
