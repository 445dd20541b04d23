"""Fourteen architectures of transformers under every scheme, on two and on three ranks.

Each is built small, with random values and every dropout on; language models also with the table
that embeds tokens and the one that scores them tied, or apart, where their configuration has it.
Three updates in fp64 are compared with one process.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from workbench.client.cluster import Cluster
from workbench.model.tracing.trace import trace
from workbench.plan.graph.graph import Graph
from workbench.plan.plans.plan import Plan

RANKS = (2, 3)
TOKENS, VOCABULARY, CLASSES = 7, 66, 5
STEPS = 3
SHARES: Mapping[int, Sequence[int]] = {2: (2, 1), 3: (2, 0, 1)}

_WIDTHS = {
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 64,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GPT = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
_OPT = {"word_embed_proj_dim": 32, "ffn_dim": 40}
_BERT = {"dim": 32, "hidden_dim": 40, "n_layers": 2, "n_heads": 4}
_T5 = {"d_model": 32, "d_kv": 8, "d_ff": 40, "num_layers": 2, "num_heads": 4}
_IMAGES = {"image_size": 16, "patch_size": 4, "num_labels": CLASSES}
_SWIN = {"embed_dim": 12, "depths": [1, 1], "num_heads": [2, 4], "window_size": 2, "mlp_ratio": 2.0}
_DROPOUTS = (
    *("attn_pdrop", "resid_pdrop", "embd_pdrop", "attention_dropout", "hidden_dropout"),
    *("hidden_dropout_prob", "attention_probs_dropout_prob", "dropout", "dropout_rate"),
)
_DROPPED = 0.1
_TIED = "tie_word_embeddings"

ARCHITECTURES: Mapping[str, Mapping[str, Any]] = {
    "gpt2": _GPT,
    "gpt_neox": {},
    "opt": _OPT,
    "llama": {},
    "mistral": {"sliding_window": None},
    "qwen3": {},
    "gemma": {},
    "phi": {},
    "bert": {},
    "roberta": {"max_position_embeddings": 66},
    "distilbert": _BERT,
    "vit": _IMAGES,
    "swin": _IMAGES | _SWIN,
    "t5": _T5,
}
"""The types of transformers, with what their configurations call otherwise."""


class Encoded(nn.Module):
    """T5's encoder, with classes of the mean of its tokens."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder, self.head = encoder, nn.Linear(_T5["d_model"], CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        """Maps ids [rows, tokens] to [rows, classes]."""
        found: Tensor = self.encoder(ids).last_hidden_state
        scores: Tensor = self.head(found.mean(1))
        return scores


@dataclass(frozen=True)
class Variant:
    """An architecture, its tables tied or apart.

    Attributes:
        name: its name for people.
        build: makes its graph.
    """

    name: str
    build: Callable[[], Graph]


def variants(library: Any, names: Sequence[str] = tuple(ARCHITECTURES)) -> Iterator[Variant]:
    """The architectures; language models twice, where their tables can be tied or not.

    Args:
        library: the package transformers.
        names: the architectures.
    """
    for name in names:
        default = library.AutoConfig.for_model(name)
        both = name not in ("vit", "swin", "t5") and hasattr(default, _TIED)
        for tied in (True, False) if both else (None,):
            said = "" if tied is None else ", tied" if tied else ", apart"
            yield Variant(f"{name}{said}", partial(_graph, library, name, tied))


def _graph(library: Any, name: str, tied: bool | None) -> Graph:
    default = library.AutoConfig.for_model(name)
    sizes = {} if name == "swin" else _WIDTHS  # which follow from its own
    wanted = {**sizes, **dict.fromkeys(_DROPOUTS, _DROPPED), **ARCHITECTURES[name]}
    fields = {field: value for field, value in wanted.items() if hasattr(default, field)}
    if tied is not None:
        fields[_TIED] = tied
    torch.manual_seed(0)
    if name == "t5":
        encoder = library.T5EncoderModel(library.AutoConfig.for_model(name, **fields))
        return trace(Encoded(encoder), input_shape=(TOKENS,), vocabulary=VOCABULARY)
    if "image_size" in fields:
        side = fields["image_size"]
        return trace(f"transformers/{name}", config=fields, input_shape=(3, side, side))
    return trace(f"transformers/{name}", config=fields, input_shape=(TOKENS,))


def plans_of(graph: Graph, ranks: int) -> dict[str, Plan]:
    """Plans by label, which together have every scheme that the model's layers can have."""
    shares = SHARES[ranks]
    found = {
        "rows, unequal": Plan.data_parallel(graph, ranks, shares),
        "hybrid": Plan.hybrid(graph, ranks),
        "hybrid, tokens divided": Plan.hybrid(graph, ranks, shard_tokens=tuple(shares)),
        "unequal": Plan.filters(graph, ranks, tuple(shares)),
    }
    tables = [layer.name for layer in graph.layers if layer.kind == "embedding"]
    for scheme in ("shard_in", "shard_out") if tables else ():
        plan = Plan.data_parallel(graph, ranks)
        for name in tables:
            plan = plan.with_layer(name, scheme=scheme, shares=shares)
        found[f"tables by {'tokens' if scheme == 'shard_in' else 'features'}"] = plan
    return found


def exact(cluster: Cluster, graph: Graph, ranks: int) -> tuple[float, list[str]]:
    """(the worst relative error, the plans that are not exact) of a model on so many ranks."""
    worst, wrong = 0.0, []
    for label, plan in plans_of(graph, ranks).items():
        found = cluster.verify(plan, precision="fp64", steps=STEPS)
        worst = max(worst, *(one.error for one in found.differences if one.what != "repeat"))
        if not found.exact:
            wrong.append(label)
    return worst, wrong
