"""The cases of `bench predict`: models, plans and experiments of every predictable kind."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import nn

from workbench.bench.harness.nets import GPT, INPUT_SHAPE, Encoder, Llama, SmallVGG
from workbench.model.tracing.trace import trace
from workbench.plan.collective.codec import Codec
from workbench.plan.experiment.experiment import (
    SGD,
    AdamW,
    Experiment,
    LocalSGD,
    ParameterServer,
    Pipelined,
    Synchronous,
    Synthetic,
)
from workbench.plan.extension.extension import name_of
from workbench.plan.graph.graph import Graph, Input
from workbench.plan.plans.plan import Plan

ENGINES = 4
ROWS = 8  # of a rank
STEPS = 3
MOMENTUM = SGD(lr=0.01, momentum=0.9)
SMALL, TINY = "SmallVGG", "TinyVGG"
WIDTHS = {SMALL: 64, TINY: 16}
SIZES = {"swin_t": 64, "swin_v2_t": 64, "efficientnet_b0": 64, "convnext_tiny": 64, "maxvit_t": 224}
"""Heights and widths of images where 32 would not do."""


@dataclass(frozen=True)
class Case:
    """A plan and experiment to run, with its name, and whether its steps are timed too."""

    plan: str
    experiment: Experiment
    module: nn.Module | None = None
    timed: bool = False

    @property
    def name(self) -> str:
        """The model, the plan, and other settings."""
        return f"{self.experiment.plan.graph.source.name}, {self.plan}"


def _unequal(graph: Graph) -> Plan:
    """A plan with every sharded layer in shards of 3 to 1."""
    plan = Plan.hybrid(graph, 2)
    for name, choice in plan.layers.items():
        if choice.scheme in ("shard_out", "shard_heads"):
            plan = plan.with_layer(name, shares=(3, 1))
    return plan


def _filters(graph: Graph) -> Plan:
    """The unequal plan, with two convolutions of the small VGG sharded too."""
    plan = _unequal(graph)
    for name in ("features.12", "features.14"):
        plan = plan.with_layer(name, scheme="shard_out", group_size=2, shares=(3, 1))
    return plan


PLANS: Mapping[str, Callable[[Graph], Plan]] = {
    "alone": lambda graph: Plan.data_parallel(graph, 1),
    "data parallel, 4": lambda graph: Plan.data_parallel(graph, 4),
    "data parallel, 2": lambda graph: Plan.data_parallel(graph, 2),
    "data parallel, 2, synchronized": lambda graph: Plan.data_parallel(graph, 2).with_batch_norm(
        "synchronized"
    ),
    "hybrid, 4": lambda graph: Plan.hybrid(graph, 4),
    "hybrid, 2 x 2": lambda graph: Plan.hybrid(graph, 4, 2),
    "hybrid, 2": lambda graph: Plan.hybrid(graph, 2),
    "unequal, 2": _unequal,
    "unequal filters, 2": _filters,
    "hybrid, 4, rounds B": lambda graph: Plan.hybrid(graph, 4).with_rounds("B"),
    "hybrid, 2 x 2, rounds B/K": lambda graph: Plan.hybrid(graph, 4, 2).with_rounds("B/K"),
}

_LOCAL = LocalSGD(every=9)
_AVERAGED = LocalSGD(every=3, momentum="average")
_INT8, _FP16 = Codec(name="int8"), Codec(name="fp16")
_FEEDBACK = Codec(name="int8", error_feedback=True)
_PER_ROUND = Synchronous(per_round=True)
_FUSED = dict(sync=Synchronous(algorithm="direct"), shard_optimizer=True)

# Model, plan, recomputed layers, and further fields of the experiment.
_Row = tuple[str, str, tuple[str, ...], dict[str, object]]

QUICK: tuple[_Row, ...] = (
    (TINY, "hybrid, 4", (), {}),
    (TINY, "hybrid, 2 x 2, rounds B/K", (), {}),
)

_DOUBLE = 2 * ENGINES * ROWS

TIMED: tuple[_Row, ...] = (
    (SMALL, "data parallel, 4", (), {}),
    (SMALL, "hybrid, 4", (), {}),
    (SMALL, "hybrid, 2 x 2", (), {}),
    (SMALL, "hybrid, 4, rounds B", (), {}),
    (SMALL, "hybrid, 2 x 2, rounds B/K", (), {}),
    (SMALL, "hybrid, 2 x 2, rounds B/K", (), dict(sync=_PER_ROUND)),
    (SMALL, "hybrid, 4", (), dict(accumulate=2, batch_size=_DOUBLE)),
    (SMALL, "data parallel, 4", ("features.*",), {}),
    (SMALL, "data parallel, 4", (), dict(shard_optimizer=True)),
    (SMALL, "data parallel, 4", (), dict(sync=Synchronous(algorithm="ring"))),
    (SMALL, "hybrid, 2 x 2", (), dict(sync=_AVERAGED)),
    (SMALL, "data parallel, 4", (), dict(batch_size=_DOUBLE)),
    (SMALL, "data parallel, 2", (), {}),
    (SMALL, "hybrid, 2", (), {}),
    (SMALL, "unequal, 2", (), {}),
    (SMALL, "unequal filters, 2", (), {}),
    (SMALL, "data parallel, 2", ("features.[0-4]", "features.[6-9]"), {}),
    (SMALL, "data parallel, 2", (), dict(sync=Pipelined(width=2))),
    (SMALL, "data parallel, 2", (), dict(sync=Synchronous(codec=_FP16))),
    (SMALL, "data parallel, 2", (), dict(sync=Synchronous(bucket_bytes=2**18))),
    (SMALL, "data parallel, 2", (), dict(sync=ParameterServer())),
    ("resnet18", "data parallel, 4", (), {}),
    ("resnet18", "data parallel, 4", (), dict(batch_size=_DOUBLE)),
    ("resnet18", "data parallel, 2", (), {}),
    ("resnet18", "data parallel, 2", ("layer[1-4].*",), {}),
    ("resnet18", "data parallel, 2, synchronized", (), {}),
    ("mobilenet_v3_small", "data parallel, 4", (), {}),
    ("mobilenet_v3_small", "data parallel, 4", (), dict(batch_size=_DOUBLE)),
    ("mobilenet_v3_small", "hybrid, 4", (), {}),
    ("mobilenet_v3_small", "data parallel, 2, synchronized", (), {}),
    ("googlenet", "data parallel, 4", (), {}),
    ("googlenet", "data parallel, 4", (), dict(batch_size=_DOUBLE)),
    ("googlenet", "data parallel, 2", (), {}),
    ("googlenet", "data parallel, 2, synchronized", (), {}),
    ("densenet121", "data parallel, 4", (), {}),
    ("densenet121", "data parallel, 2", (), {}),
    ("densenet121", "data parallel, 2", ("features.denseblock*",), {}),
    ("densenet121", "data parallel, 2, synchronized", (), {}),
    ("vgg11", "data parallel, 4", (), {}),
    ("vgg11", "hybrid, 4", (), {}),
    ("vgg11", "hybrid, 2 x 2", (), {}),
    ("vit_b_16", "data parallel, 4", (), {}),
    ("vit_b_16", "hybrid, 4", (), {}),
)
"""For each model, plans that differ clearly."""

METERED: tuple[_Row, ...] = (
    (SMALL, "hybrid, 4", (), dict(optimizer=AdamW())),
    (SMALL, "hybrid, 4", (), dict(precision="bf16", batch_size=32)),
    (SMALL, "hybrid, 4", (), dict(precision="fp64")),
    (SMALL, "unequal filters, 2", (), dict(precision="bf16", optimizer=AdamW(), batch_size=16)),
    (SMALL, "data parallel, 2", ("features.*",), dict(batch_size=64)),
    (SMALL, "hybrid, 2 x 2, rounds B/K", ("*",), dict(batch_size=64)),
    (SMALL, "hybrid, 2", ("features.*",), dict(precision="bf16", batch_size=32)),
    (SMALL, "hybrid, 2", ("features.*",), dict(accumulate=3, optimizer=AdamW())),
    (SMALL, "data parallel, 4", (), dict(shard_optimizer=True, optimizer=AdamW())),
    (SMALL, "hybrid, 2 x 2", (), dict(shard_optimizer=True)),
    (SMALL, "data parallel, 2", (), dict(shard_optimizer=True, batch_size=4)),
    (SMALL, "data parallel, 4", (), _FUSED | dict(optimizer=AdamW())),
    (SMALL, "hybrid, 2 x 2", (), _FUSED | dict(shard_optimizer=(1, 0, 2, 3))),
    (SMALL, "hybrid, 2 x 2", (), dict(sync=Synchronous(algorithm="halving_doubling"))),
    (SMALL, "data parallel, 2", (), dict(sync=Synchronous(algorithm="backend"))),
    (SMALL, "data parallel, 2", (), dict(sync=_LOCAL)),
    (SMALL, "hybrid, 2 x 2, rounds B/K", (), dict(sync=_PER_ROUND, shard_optimizer=True)),
    (SMALL, "data parallel, 2", (), dict(batch_size=15, accumulate=4)),
    (SMALL, "hybrid, 2", (), dict(sync=Pipelined(width=2), optimizer=AdamW())),
    (SMALL, "hybrid, 2 x 2", (), dict(sync=Pipelined(width=3, codec=_INT8))),
    (SMALL, "data parallel, 2", (), dict(sync=Pipelined(compensation="delay"))),
    (SMALL, "data parallel, 4", (), dict(sync=Synchronous(codec=_INT8, algorithm="ring"))),
    (SMALL, "data parallel, 2", (), dict(sync=Synchronous(codec=_FEEDBACK))),
    (SMALL, "hybrid, 2 x 2", (), dict(sync=ParameterServer(server=3), optimizer=AdamW())),
    ("resnet18", "data parallel, 2, synchronized", ("*",), {}),
    ("resnet18", "data parallel, 2", (), dict(precision="bf16", batch_size=16)),
    ("resnet18", "data parallel, 2", (), dict(precision="fp64", optimizer=AdamW())),
    ("resnet18", "hybrid, 4", (), dict(optimizer=AdamW())),
    ("densenet121", "hybrid, 4", (), dict(optimizer=AdamW())),
    ("googlenet", "hybrid, 2 x 2", (), dict(optimizer=AdamW())),
    ("vit_b_16", "hybrid, 2", ("encoder.*",), {}),
    ("vit_b_16", "data parallel, 2", (), dict(shard_optimizer=True, optimizer=AdamW())),
    ("vit_b_16", "unequal, 2", (), {}),
    ("swin_t", "data parallel, 2", (), {}),
    ("swin_t", "hybrid, 2", (), dict(optimizer=AdamW())),
    ("swin_t", "data parallel, 2", ("features.[13].*",), {}),
    ("swin_v2_t", "unequal, 2", (), {}),
    ("efficientnet_b0", "data parallel, 2", (), {}),
    ("convnext_tiny", "hybrid, 2", (), dict(optimizer=AdamW())),
    ("maxvit_t", "data parallel, 2", (), dict(batch_size=4)),
)


_AT_224 = " at 224"
_LARGE = ("vgg11", "resnet50", "vit_b_16")
_HALF: dict[str, object] = dict(precision="bf16")

LARGE: tuple[_Row, ...] = tuple(
    (f"{model}{_AT_224}", plan, (), dict(batch_size=32 * ranks, **fields))
    for model in _LARGE
    for plan, ranks, fields in (
        ("alone", 1, {}),
        ("alone", 1, _HALF),
        ("data parallel, 2", 2, {}),
        ("hybrid, 2", 2, {}),
        ("hybrid, 2", 2, _HALF),
    )
)
"""Models at the size that they were made for, 32 images a rank: for GPUs, or whoever has time."""


_BLOCKS, _WIDTH, _TOKENS, _VOCABULARY = 2, 256, 64, 1000
_IDS = Input((_TOKENS,), vocabulary=_VOCABULARY)
_MASKED = {"ids": _IDS, "mask": Input((_TOKENS,), "bool")}
_OF_TEXTS: Mapping[str, Callable[..., nn.Module]] = {"GPT": GPT, "Llama": Llama, "Encoder": Encoder}

_IN_MANY_WAYS: tuple[tuple[str, tuple[str, ...], dict[str, object]], ...] = (
    ("alone", (), {}),
    ("data parallel, 2", (), {}),
    ("data parallel, 4", (), dict(shard_optimizer=True)),
    ("data parallel, 2", ("*",), dict(batch_size=32)),
    ("data parallel, 2", (), _HALF | dict(batch_size=16)),
    ("hybrid, 2", (), {}),
    ("hybrid, 4", (), {}),
    ("hybrid, 2 x 2", (), dict(accumulate=2, batch_size=_DOUBLE)),
    ("hybrid, 2", (), _HALF | dict(batch_size=16)),
    ("unequal, 2", (), dict(optimizer=MOMENTUM)),
)

TEXTS: tuple[_Row, ...] = tuple(
    (model, plan, recomputed, dict[str, object](optimizer=AdamW()) | fields)
    for model in _OF_TEXTS
    for plan, recomputed, fields in _IN_MANY_WAYS
)
"""Transformers: causal, with grouped queries and a table that is the head too, and with a mask."""


def quick() -> Iterator[Case]:
    """A tiny VGG under two plans."""
    return (_case(row, timed=True) for row in QUICK)


def every(named: str = "") -> Iterator[Case]:
    """All cases but `texts`; the timed ones of one model follow each other.

    Large ones, and `texts`, only if `named` is a part of the names of their model and plan:
    "resnet18", or "resnet18, hybrid".
    """
    further = ((LARGE, True), (TEXTS, False)) if named else ()
    for rows, timed in ((TIMED, True), (METERED, False), *further):
        yield from (_case(row, timed=timed) for row in rows if named in f"{row[0]}, {row[1]}")


def texts() -> Iterator[Case]:
    """Cases of transformers."""
    return (_case(row, timed=False) for row in TEXTS)


def _case(row: _Row, *, timed: bool) -> Case:
    model, name, recomputed, fields = row
    graph, module = _model(model)
    plan = PLANS[name](graph).with_recompute(*recomputed)
    experiment = Experiment(
        plan=plan,
        data=Synthetic(samples=512, classes=graph.num_classes or 10),
        batch_size=ROWS * plan.world_size,
        optimizer=MOMENTUM,
        steps=STEPS,
    ).replace(**fields)
    return Case(", ".join([name, *_words(recomputed, experiment)]), experiment, module, timed)


TYPES = (
    *("bert", "bloom", "cohere", "gemma", "gemma2", "gpt2", "gpt_neo", "gpt_neox", "gptj", "llama"),
    *("mistral", "opt", "phi", "qwen2", "qwen3", "roberta", "stablelm", "starcoder2"),
)
"""The types of the package transformers whose memory is measured, eight times as wide as small."""

_SIZES: tuple[tuple[int, tuple[str, ...]], ...] = (
    (64, ("vocab_size", "max_position_embeddings", "n_positions", "n_ctx", "max_seq_len")),
    (32, ("hidden_size", "n_embd", "d_model", "word_embed_proj_dim", "embedding_size")),
    (64, ("intermediate_size", "ffn_dim", "ffn_hidden_size", "decoder_ffn_dim", "n_inner", "d_ff")),
    (2, ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "decoder_layers")),
    (4, ("num_attention_heads", "n_head", "num_heads", "n_heads", "attention_heads")),
    (4, ("decoder_attention_heads", "num_local_experts", "num_experts", "rotary_dim")),
    (2, ("num_key_value_heads", "num_kv_heads", "num_experts_per_tok", "eos_token_id")),
    (8, ("head_dim",)),
    (0, ("pad_token_id",)),
    (1, ("bos_token_id",)),
)
_LEAST_WIDTH = 8  # of these sizes, the ones from here on are widths, or numbers of tokens


def small_language_model(transformers: Any, name: str, wider: int = 1) -> dict[str, Any]:
    """The arguments of `trace` for a small causal language model of a type, so many times as wide.

    Its configuration's sizes are set by their names. Whatever the package raises for sizes that do
    not fit each other is raised.
    """
    default = transformers.AutoConfig.for_model(name)
    config = {
        field: size * wider if size >= _LEAST_WIDTH else size
        for size, fields in _SIZES
        for field in fields
        if isinstance(getattr(default, field, None), int | None) and hasattr(default, field)
    }
    return {
        "model": f"transformers/{name}",
        "config": config | {"use_cache": False},
        "head": "CausalLM",
        "input_shape": (8 * wider,),
        "vocabulary": 64 * wider,
    }


def of_package(transformers: Any, name: str) -> list[Case]:
    """A type of the package transformers under two plans."""
    torch.manual_seed(0)
    graph, cases = trace(**small_language_model(transformers, name, wider=8)), []
    for label in ("data parallel, 2", "hybrid, 2"):
        plan = PLANS[label](graph)
        experiment = Experiment(
            plan=plan,
            data=Synthetic(samples=2 * ROWS * STEPS, classes=graph.num_classes or 10),
            batch_size=2 * ROWS,
            optimizer=MOMENTUM,
            steps=STEPS,
        )
        cases.append(Case(label, experiment))
    return cases


def _words(recomputed: tuple[str, ...], experiment: Experiment) -> Iterator[str]:
    """The parts of a case's name besides the plan, the optimizer and the precision."""
    sync = experiment.sync
    if recomputed:
        yield f"{' '.join(recomputed)} recomputed"
    if experiment.batch_size == _DOUBLE and experiment.plan.world_size == ENGINES:
        yield "twice the batch"
    if experiment.accumulate > 1:
        yield f"{experiment.accumulate} micro-batches"
    if experiment.shard_optimizer:
        yield "optimizer in parts"
    if isinstance(sync, LocalSGD):
        yield f"local, every {sync.every}, momentum {sync.momentum}"
    if isinstance(sync, Synchronous) and sync.per_round:
        yield "a step for each round"
    if isinstance(sync, Pipelined):
        yield f"pipelined, {sync.width}" + (", compensated" if sync.compensation else "")
    if isinstance(sync, ParameterServer):
        yield "parameter server"
    if isinstance(sync, Synchronous | Pipelined):
        if sync.algorithm != "auto":
            yield name_of(sync.algorithm)
        if sync.codec is not None:
            yield sync.codec.inexact
    if sync.bucket_bytes != type(sync)().bucket_bytes:
        yield f"buckets of {sync.bucket_bytes / 2**20:g} MiB"


@cache
def _model(name: str) -> tuple[Graph, nn.Module | None]:
    if name in WIDTHS:
        module = SmallVGG(WIDTHS[name])
        return trace(module, input_shape=INPUT_SHAPE), module
    if name in _OF_TEXTS:
        net = _OF_TEXTS[name](_BLOCKS, _WIDTH, _TOKENS, _VOCABULARY)
        return trace(net, inputs=_MASKED if name == "Encoder" else {"ids": _IDS}), net
    if name.endswith(_AT_224):
        return trace(name.removesuffix(_AT_224), input_shape=(3, 224, 224), num_classes=1000), None
    side = SIZES.get(name, 32)
    return trace(name, input_shape=(3, side, side), num_classes=10), None
