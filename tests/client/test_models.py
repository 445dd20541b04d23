"""Models that others wrote, as they are: each traced, and verified under several plans in fp64.

    torchvision    the smallest classifier of each family
    timm           one model of each module that has classifiers, the smallest of a few that are
                   called small
    transformers   every type that has a causal language model, small; and fourteen architectures
                   under every scheme, their tables of tokens tied and apart, on two and three ranks

A few are tried; `MODELS=all pytest tests/client/test_models.py` tries all, for about an hour. A
model that is refused, with a line and a remedy, is skipped with them.
"""

import math
import os
import signal
from contextlib import contextmanager
from functools import partial

import psutil
import pytest
import torch
from torch import nn

import workbench as wb
from workbench.bench.predict.cases import small_language_model
from workbench.model.errors import ModelError, TraceError
from workbench.model.vision import torchvision

pytestmark = pytest.mark.slow
EVERY = os.environ.get("MODELS") == "all"
COPIES = 4  # of a model in every process: weights, gradients, momentum, more
MOST_PARAMETERS = 5_000_000  # a language model with more is not small
MOST_S = 120  # to trace one; some state-space models are loops of thousands of steps

models = torchvision().models
# Images for which 32 is too small: strides, pools and patches leave nothing.
SIZES = {"alexnet": 64, "inception_v3": 299, "maxvit_t": 224, "vit_h_14": 28}


def family(name):
    return models.get_model_builder(name).__module__.rpartition(".")[2]


def smallest_of_families():
    """The classifier with the fewest parameters of each of torchvision's modules."""
    sizes = {}
    with torch.device("meta"):
        for name in models.list_models(module=models):
            options = {"init_weights": False} if name in ("googlenet", "inception_v3") else {}
            sizes[name] = size(models.get_model(name, num_classes=10, **options))
    found = {}
    for name in sorted(sizes, key=sizes.__getitem__):
        found.setdefault(family(name), name)
    return sorted(found.values())


def size(module):
    return sum(parameter.numel() for parameter in module.parameters())


FAMILIES = smallest_of_families() if EVERY else ["squeezenet1_1", "shufflenet_v2_x0_5"]
transformers = pytest.importorskip("transformers") if EVERY else None
timm = pytest.importorskip("timm") if EVERY else None
TYPES = []
MODULES = []
if EVERY:
    TYPES = sorted(transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    MODULES = sorted(timm.list_modules())


@pytest.fixture(scope="module")
def clusters(tmp_path_factory):
    """Clusters by their size, one at a time."""
    held = {}

    def of(ranks):
        if ranks not in held:
            for cluster in held.values():
                cluster.stop()
            held.clear()
            held[ranks] = wb.Cluster(ranks, directory=tmp_path_factory.mktemp("runs"), timeout=600)
        return held[ranks]

    yield of
    for cluster in held.values():
        cluster.stop()


@contextmanager
def within(seconds):
    """Skips the test if the body takes longer."""

    def end(*_):
        pytest.skip(f"not traced within {seconds} s")

    before = signal.signal(signal.SIGALRM, end)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def traced(*args, **arguments):
    torch.manual_seed(0)
    try:
        with within(MOST_S):
            return wb.trace(*args, **arguments)
    except (TraceError, ModelError) as error:
        pytest.skip(f"refused: {error}")


def assert_exact(cluster, plans, steps=2):
    graph = plans[0].graph
    needed = 8 * COPIES * (plans[0].world_size + 1) * graph.parameters
    if needed > psutil.virtual_memory().available:
        pytest.skip(f"{needed / 2**30:.0f} GiB of memory are needed")
    for plan in plans:
        whole = plan.with_batch_norm("synchronized")
        found = cluster.verify(whole, precision="fp64", steps=steps, repeat=False)
        assert found.exact, found


@pytest.mark.parametrize("name", FAMILIES)
def test_torchvision(clusters, name):
    side = SIZES.get(name, 32)
    graph = wb.trace(name, input_shape=(3, side, side), num_classes=10)
    assert_exact(clusters(4), [wb.Plan.hybrid(graph, 4, 4)])


@pytest.mark.parametrize("name", TYPES)
def test_language_models(clusters, name):
    try:
        arguments = small_language_model(transformers, name)
        config = transformers.AutoConfig.for_model(name, **arguments["config"])
        with torch.device("meta"):
            small = size(transformers.AutoModelForCausalLM.from_config(config)) <= MOST_PARAMETERS
        module = transformers.AutoModelForCausalLM.from_config(config) if small else None
        with torch.no_grad():
            module(torch.zeros(2, 8, dtype=torch.long))
    except Exception as error:  # whatever a package raises for sizes that do not fit each other
        pytest.skip(f"it cannot be built small: {error}")
    graph = traced(**arguments)
    plans = [wb.Plan.data_parallel(graph, 2, (2, 1)), wb.Plan.hybrid(graph, 2, 2)]
    assert_exact(clusters(2), [*plans, wb.Plan.filters(graph, 2, (2, 1))])


CALLED_SMALL = ("atto", "femto", "pico", "nano", "tiny", "xxs", "_xs", "small", "_s", "mini", "18")
IMAGE_SIZES = (32, 64, 96, 128, 224, 256)


@pytest.mark.parametrize("name", MODULES)
def test_images(clusters, name):
    found = small_images(name)
    if found is None:
        pytest.skip("no classifier of it can be built small")
    graph = traced(**found)
    plans = [wb.Plan.data_parallel(graph, 2, (2, 1)), wb.Plan.hybrid(graph, 2, 2)]
    assert_exact(clusters(2), plans)


def small_images(module):
    """The arguments of `trace` for a small model of one of timm's modules."""

    def called(name):
        places = [place for place, word in enumerate(CALLED_SMALL) if word in name]
        return min(places, default=len(CALLED_SMALL)), name

    def weight(name):
        try:
            with torch.device("meta"):
                return size(timm.create_model(name, num_classes=10))
        except Exception:  # whatever it is that a model does with values as it is built
            return math.inf

    name = min(sorted(timm.list_models(module=module), key=called)[:10], key=weight, default=None)
    if name is None:
        return None
    build = partial(timm.create_model, name, num_classes=10)
    # Of few numbers each, batch norms let rounding grow.
    norms = any("BatchNorm" in type(part).__name__ for part in build().modules())
    for side in IMAGE_SIZES[norms:]:
        for given in ({}, {"img_size": side}):
            if runs(partial(build, **given), side):
                few = {"depth": 2}
                if size(build(**given)) > 20_000_000 and runs(partial(build, **given, **few), side):
                    given = given | few
                shape = {"input_shape": (3, side, side), "num_classes": 10}
                return {"model": f"timm/{name}"} | given | shape
    return None


def runs(build, side):
    """Whether torch itself gives classes for two images of this size."""
    try:
        with torch.no_grad():
            return build().eval()(torch.zeros(2, 3, side, side)).shape == (2, 10)
    except Exception:  # whatever it is that a model raises for images that are too small
        return False


TOKENS, VOCABULARY, CLASSES = 7, 66, 5
WIDTHS = {
    **{"vocab_size": VOCABULARY, "max_position_embeddings": 64, "hidden_size": 32},
    **{"intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0, "bos_token_id": 1},
    "eos_token_id": 2,
}
DROPOUTS = (
    *("attn_pdrop", "resid_pdrop", "embd_pdrop", "attention_dropout", "hidden_dropout"),
    *("hidden_dropout_prob", "attention_probs_dropout_prob", "dropout", "dropout_rate"),
)
TIED = "tie_word_embeddings"
IMAGES = {"image_size": 16, "patch_size": 4, "num_labels": CLASSES}
SWIN = {"embed_dim": 12, "depths": [1, 1], "num_heads": [2, 4], "window_size": 2, "mlp_ratio": 2.0}
ARCHITECTURES = {
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
    "gpt_neox": {},
    "opt": {"word_embed_proj_dim": 32, "ffn_dim": 40},
    "llama": {},
    "mistral": {"sliding_window": None},
    "qwen3": {},
    "gemma": {},
    "phi": {},
    "bert": {},
    "roberta": {"max_position_embeddings": 66},
    "distilbert": {"dim": 32, "hidden_dim": 40, "n_layers": 2, "n_heads": 4},
    "vit": IMAGES,
    "swin": IMAGES | SWIN,
    "t5": {"d_model": 32, "d_kv": 8, "d_ff": 40, "num_layers": 2, "num_heads": 4},
}
"""The types of transformers, with what their configurations call otherwise."""


class Encoded(nn.Module):
    """T5's encoder, with classes of the mean of its tokens."""

    def __init__(self, encoder):
        super().__init__()
        self.encoder, self.head = encoder, nn.Linear(32, CLASSES)

    def forward(self, ids):
        return self.head(self.encoder(ids).last_hidden_state.mean(1))


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "apart"])
@pytest.mark.parametrize("name", ARCHITECTURES if EVERY else [])
@pytest.mark.parametrize("ranks", [2, 3])
def test_every_scheme(clusters, ranks, name, tied):
    default = transformers.AutoConfig.for_model(name)
    if not tied and (name in ("vit", "swin", "t5") or not hasattr(default, TIED)):
        pytest.skip("it has no two tables")
    sizes = {} if name == "swin" else WIDTHS  # which follow from its own
    wanted = {**sizes, **dict.fromkeys(DROPOUTS, 0.1), **ARCHITECTURES[name], TIED: tied}
    fields = {field: value for field, value in wanted.items() if hasattr(default, field)}
    torch.manual_seed(0)
    if name == "t5":
        encoder = transformers.T5EncoderModel(transformers.AutoConfig.for_model(name, **fields))
        graph = wb.trace(Encoded(encoder), input_shape=(TOKENS,), vocabulary=VOCABULARY)
    else:
        shape = (3, 16, 16) if "image_size" in fields else (TOKENS,)
        graph = wb.trace(f"transformers/{name}", config=fields, input_shape=shape)
    shares = {2: (2, 1), 3: (2, 0, 1)}[ranks]
    plans = [
        wb.Plan.data_parallel(graph, ranks, shares),
        wb.Plan.hybrid(graph, ranks),
        wb.Plan.hybrid(graph, ranks, shard_tokens=shares),
        wb.Plan.filters(graph, ranks, shares),
    ]
    tables = [layer.name for layer in graph.layers if layer.kind == "embedding"]
    for scheme in ("shard_in", "shard_out") if tables else ():
        plan = wb.Plan.data_parallel(graph, ranks)
        for table in tables:
            plan = plan.with_layer(table, scheme=scheme, shares=shares)
        plans.append(plan)
    assert_exact(clusters(ranks), plans, steps=3)
