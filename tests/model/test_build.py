import threading
import warnings

import pytest
import torch
from torch import nn

from workbench.model import ModelError, TraceError, build, build_fake, trace
from workbench.model.build import code_of, named, structure
from workbench.plan.graph.graph import Source

IMAGE = (3, 32, 32)


def source(name, shape=IMAGE, **arguments):
    return named(name, shape, arguments)


def test_builds_with_torch_s_own_values():
    torch.manual_seed(3)
    ours = build(source("squeezenet1_1", num_classes=4))
    torch.manual_seed(3)
    theirs = type(ours)("1_1", num_classes=4)
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", ["googlenet", "inception_v3"])
def test_warns_of_nothing(name):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        build(source(name, num_classes=4))


@pytest.mark.parametrize(
    "name", ["squeezenet1_1", "regnet_x_400mf", "swin_v2_t", "vit_b_16", "convnext_tiny"]
)
def test_the_structure_is_the_model_s(name):
    given = source(name, num_classes=4)
    fake = build_fake(given)
    assert fake.training
    assert all(tensor.is_meta for tensor in fake.state_dict().values())
    plain = build(given).state_dict()
    assert {n: (t.shape, t.dtype) for n, t in fake.state_dict().items()} == {
        n: (t.shape, t.dtype) for n, t in plain.items()
    }


def test_the_structure_takes_no_memory(allocated):
    given = source("vgg19", num_classes=1000)
    build_fake(given)
    assert allocated(lambda: build_fake(given)) < 1_000_000


def test_an_unknown_name_suggests_the_nearest():
    with pytest.raises(ModelError, match="no model 'vgg12' of torchvision; did you mean 'vgg1"):
        source("vgg12")


def test_a_model_that_is_no_classifier_is_unknown():
    with pytest.raises(ModelError, match="no model 'fasterrcnn_resnet50_fpn'"):
        source("fasterrcnn_resnet50_fpn")


def test_an_unknown_argument_is_named():
    with pytest.raises(ModelError, match=r"vgg11 cannot be built with depth=3: .*'depth'"):
        build_fake(source("vgg11", depth=3))


def test_pretrained_weights_come_with_a_module():
    with pytest.raises(ModelError, match="build the module with its weights"):
        source("vgg11", weights="DEFAULT")


def test_arguments_are_plain_values():
    with pytest.raises(ModelError, match=r"norm_layer=.* is no plain value"):
        source("resnet18", norm_layer=nn.Identity)


def test_arguments_are_sorted_and_hashable():
    given = source("resnet50", replace_stride_with_dilation=[False, True, True], num_classes=2)
    assert given.arguments == (
        ("num_classes", 2),
        ("replace_stride_with_dilation", (False, True, True)),
    )
    hash(given)


def test_a_vision_transformer_is_told_the_image_s_size():
    assert dict(source("vit_b_16").arguments) == {"image_size": 32}
    assert dict(source("maxvit_t", (3, 224, 224)).arguments) == {"input_size": (224, 224)}
    assert dict(source("vit_b_16", image_size=64).arguments) == {"image_size": 64}


def test_an_image_that_does_not_fit_is_an_error():
    with pytest.raises(
        ModelError, match=r"vit_h_14 cannot be built with image_size=32.*patch size"
    ):
        build_fake(source("vit_h_14"))


def test_a_user_s_module_has_its_values_in_the_module_alone():
    graph = trace(nn.Linear(2, 3), input_shape=(2,))
    with pytest.raises(ModelError, match="a module of your own"):
        build(graph.source)


def test_a_user_s_module_cannot_come_from_text():
    with pytest.raises(ModelError, match="trace the module again"):
        build_fake(Source("module", "Net"))


def encoder(**options):
    return nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, **options)


def test_equal_modules_have_equal_code_whatever_their_weights_are():
    assert code_of(encoder()) == code_of(encoder()) is not None


@pytest.mark.parametrize(
    "other", [encoder(activation=torch.tanh), encoder(dropout=0.2), encoder().eval(), nn.GRU(8, 8)]
)
def test_other_modules_have_other_code(other):
    assert code_of(encoder()) != code_of(other)


def test_nothing_is_said_of_modules_that_hold_indices():
    module = nn.Linear(2, 2)
    module.register_buffer("order", torch.tensor([1, 0]))
    assert code_of(module) is None


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (torch.eye(3).to_sparse(), "'held' of Linear is sparse_coo, .* register it dense, .*dense"),
        (torch.eye(3).double(), "'held' of Linear is float64, and 'weight' is not: .*float32, too"),
    ],
)
def test_what_cannot_be_kept_as_it_is_is_refused_by_name(given, says):
    module = nn.Linear(2, 3)
    module.register_buffer("held", given)
    with pytest.raises(TraceError, match=says):
        structure(module)


def test_a_module_given_in_float64_has_one_precision():
    module = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)).double()
    assert {held.dtype for held in structure(module).parameters()} == {torch.float32}


@pytest.mark.parametrize(
    ("held", "kind"),
    [
        (threading.Lock(), "lock"),
        ({"inner": [threading.Lock()]}, "dict"),
        ((i for i in "ab"), "generator"),
    ],
)
def test_an_attribute_that_cannot_be_copied_is_named(held, kind):
    model = nn.Sequential(nn.Linear(4, 3))
    model[0].handle = held
    model.method = model[0].extra_repr  # a method of a part that cannot be copied is not the cause
    with pytest.raises(TraceError, match=rf"cause is its attribute '0.handle' \({kind}\): hold"):
        structure(model)


LOCK = threading.Lock()


class Locked(nn.Linear):
    lock = threading.Lock()

    def forward(self, x):
        with LOCK, self.lock:
            return super().forward(x)


def test_what_is_no_attribute_of_the_instance_is_not_copied():
    assert trace(Locked(4, 3), input_shape=(4,)).num_classes == 3
