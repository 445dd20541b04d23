"""The benchmark of other packages' models, with objects that answer as these packages do."""

import sys
from contextlib import nullcontext
from dataclasses import dataclass
from types import MappingProxyType, SimpleNamespace

import pytest
from torch import nn

from workbench.bench.packages.packages import IMAGES, LANGUAGE, VOCABULARY, run
from workbench.bench.progress import Progress


@pytest.fixture(autouse=True)
def no_engines(monkeypatch, request):
    """Models are traced, and not verified."""
    if "slow" not in request.keywords:
        place = "workbench.bench.packages.packages."
        monkeypatch.setattr(place + "Cluster", lambda *_, **__: nullcontext())
        monkeypatch.setattr(place + "_verified", lambda *_: {"exact": "yes"})


def last(only):
    *_, report = run(Progress(say=lambda line: None, only=only), quick=False)
    return {str(row["model"]): row for row in report.rows}, report


class Mixed(nn.Module):
    def forward(self, x):
        x = x.flatten(1)[:, :10]
        return x / x.sum(0)


class NeedsLarge(nn.Sequential):
    def __init__(self, size):
        super().__init__(nn.Flatten(), nn.Linear(3 * size * size, 10))


TIMM = {
    "plain": {"plain_nano": lambda: NeedsLarge(128), "plain_tiny": lambda: NeedsLarge(96)},
    "mixed": {"mixed": Mixed},
    "broken": {"broken": lambda: nn.Linear(1, 1)},
    "layers": {},
}


@pytest.mark.slow
def test_a_small_model_of_each_module_is_traced(monkeypatch):
    models = {name: build for module in TIMM.values() for name, build in module.items()}

    def create_model(name, num_classes):
        return models[name]()

    library = SimpleNamespace(
        list_modules=lambda: list(TIMM),
        list_models=lambda module=None: list(TIMM[module]),
        is_model=models.__contains__,
        create_model=create_model,
    )
    monkeypatch.setitem(sys.modules, "timm", library)
    rows, report = last(IMAGES)
    assert set(rows) == {"timm/plain_tiny", "timm/mixed"}
    assert rows["timm/plain_tiny"]["parameters"] == 3 * 96 * 96 * 10 + 10
    assert rows["timm/plain_tiny"]["between"] == "whole"
    assert "lost the batch" in rows["timm/mixed"]["refused"]
    assert report.figures["traced_images"].median == 0.5
    assert "images: 1 of 2 are traced, 50%" in report.notes[0]


@dataclass
class Config:
    kind: str
    vocab_size: int = 50_000
    hidden_size: int = 768
    num_attention_heads: int = 12
    use_cache: bool = True
    deep: tuple[int, ...] = (1, 2)


class Language(nn.Module):
    """Token ids in, scores out, by attention whose heads can be cut; or large in any case."""

    def __init__(self, config):
        super().__init__()
        self.config, width = config, config.hidden_size
        self.table = nn.Embedding(config.vocab_size, width)
        self.qkv, self.o = nn.Linear(width, 3 * width), nn.Linear(width, width)
        large = config.kind == "large"
        self.head = nn.Linear(width, 6_000_000 // width if large else config.vocab_size)

    def forward(self, ids):
        b, t = ids.shape
        heads = self.config.num_attention_heads
        q, k, v = self.qkv(self.table(ids)).view(b, t, 3, heads, -1).unbind(2)
        y = (q.transpose(1, 2) @ k.transpose(1, 2).mT) @ v.transpose(1, 2)
        return {"logits": self.head(self.o(y.transpose(1, 2).flatten(2)))}


@pytest.fixture
def language_models(monkeypatch):
    kinds = ["large", "small"]

    class AutoModelForCausalLM:
        _model_mapping = MappingProxyType({Config: Language})

        @staticmethod
        def from_config(config):
            return Language(config)

    def for_model(kind, num_labels=None, experts_implementation=None, **fields):
        return Config(kind, **fields)

    auto = SimpleNamespace(
        modeling_auto=SimpleNamespace(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES=dict.fromkeys(kinds)),
        configuration_auto=SimpleNamespace(CONFIG_MAPPING_NAMES=dict.fromkeys(kinds)),
    )
    library = SimpleNamespace(
        AutoConfig=SimpleNamespace(for_model=for_model),
        AutoModelForCausalLM=AutoModelForCausalLM,
        models=SimpleNamespace(auto=auto),
    )
    monkeypatch.setitem(sys.modules, "transformers", library)


def test_every_type_with_a_language_model_is_built_small(language_models):
    rows, report = last(LANGUAGE)
    assert set(rows) == {"transformers/small"}
    assert rows["transformers/small"]["between"] == "cut"
    parameters = 2 * 32 * VOCABULARY + VOCABULARY + 4 * 32 * 32 + 4 * 32
    assert rows["transformers/small"]["parameters"] == parameters
    assert report.figures["traced_language"].median == 1.0


@pytest.mark.slow
def test_memory_is_measured_of_wider_ones(language_models, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("workbench.bench.packages.packages.MEMORY", ("large", "small"))
    rows, report = last("memory")
    (row,) = rows.values()
    assert (row["refused"], row["traffic"]) == ("-", "equal")
    assert 0 <= row["memory, data parallel"] < 0.01
    assert report.figures["memory_error_worst"].median < 0.05
    assert "predicted peaks of 2 cases" in " ".join(report.notes)


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match=r"pip install 'parallel-workbench\[models\]'"):
        last(LANGUAGE)
