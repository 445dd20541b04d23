"""Models that other packages bring, as they are: transformers' language models, timm's families.

Each is built small, with random values: of transformers every type that has a causal language
model, from a configuration whose sizes are set to small ones by their names; of timm one model of
each module that has classifiers, the smallest of those that are called small. Memory and traffic of
some of transformers', at larger sizes, are compared with what is predicted; and fourteen
architectures are verified under every scheme (`architectures.py`).
"""

import importlib
import math
import signal
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import psutil
import torch
from torch import nn

from workbench.bench.packages.architectures import RANKS as RANKS_OF_SCHEMES
from workbench.bench.packages.architectures import STEPS as STEPS_OF_SCHEMES
from workbench.bench.packages.architectures import Variant, exact, variants
from workbench.bench.plot import Bar, Chart
from workbench.bench.predict.cases import MOMENTUM, STEPS, Case
from workbench.bench.predict.memory import KernelMachines, memory_cells
from workbench.bench.predict.predict import STEPPING, is_traffic_equal
from workbench.bench.progress import Part, Progress
from workbench.bench.report import Cell, Figure, Report
from workbench.client.cluster import Cluster
from workbench.engine.calls import give_back
from workbench.model.errors import ModelError, TraceError
from workbench.model.tracing.trace import trace
from workbench.model.vision import torchvision
from workbench.plan.experiment.experiment import Experiment, Synthetic
from workbench.plan.graph.graph import Graph
from workbench.plan.plans.plan import Plan
from workbench.predict.prediction import predict
from workbench.store.errors import RunError

LANGUAGE, IMAGES, SCHEMES = "language", "images", "schemes"
RANKS = 2
TOKENS, VOCABULARY = 8, 64
MOST_PARAMETERS = 5_000_000
"""A model with more is not small, whatever its configuration says."""

SHORTLIST = 10
"""So many of a module's models, those that are called small first, are asked for their size."""

LARGE, FEW_BLOCKS = 20_000_000, 2
"""Of timm's with more parameters, so many blocks are enough where their number can be given."""

COPIES = 4
"""What verifying holds of a model in every process, in fp64: weights, gradients, momentum, more."""

MOST_S = 120
"""Seconds that tracing one may take; some state-space models are loops of thousands of steps."""

MEMORY = (
    *("bert", "bloom", "cohere", "gemma", "gemma2", "gpt2", "gpt_neo", "gpt_neox", "gptj", "llama"),
    *("mistral", "opt", "phi", "qwen2", "qwen3", "roberta", "stablelm", "starcoder2"),
)
"""The types whose memory is measured, and how much larger their tokens and widths are there."""

LARGER, ROWS = 8, 8

QUICK = {LANGUAGE: ("gpt2", "llama", "qwen3"), IMAGES: ("resnet", "vision_transformer")}

OF_MEMORY = ("memory, data parallel", "memory, hybrid")

_SMALL: tuple[tuple[int, tuple[str, ...]], ...] = (
    (VOCABULARY, ("vocab_size",)),
    (VOCABULARY, ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len")),
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
LEAST_WIDTH = 8
"""Of the sizes above, those from here on are widths, or numbers of tokens; others count parts."""

_CALLED_SMALL = ("atto", "femto", "pico", "nano", "tiny", "xxs", "_xs", "small", "_s", "mini", "18")
_IMAGE_SIZES = (32, 64, 96, 128, 224, 256)


@dataclass(frozen=True)
class Candidate:
    """A model to try.

    Attributes:
        kind: whether it reads tokens or images, `LANGUAGE` or `IMAGES`.
        name: its name for `trace`: "transformers/gpt2".
        arguments: the further arguments of `trace`.
    """

    kind: str
    name: str
    arguments: Mapping[str, Any]

    def traced(self) -> Graph:
        """Its graph, by the seed 0."""
        torch.manual_seed(0)
        return trace(self.name, **self.arguments)


def run(progress: Progress, *, quick: bool) -> Iterator[Report]:
    """Traces all models, and verifies each under two or three plans; `quick` a few."""
    kinds = [kind for kind in (LANGUAGE, IMAGES) if progress.only in (None, kind)]
    lists = {kind: _names(kind, quick) for kind in kinds}
    parts = [Part(kind, len(names), 15) for kind, names in lists.items()]
    measured = QUICK[LANGUAGE] if quick else MEMORY
    several = list(variants(_library(LANGUAGE))) if progress.only in (None, SCHEMES) else []
    several = several[:1] if quick else several
    schemes = Part(SCHEMES, len(RANKS_OF_SCHEMES) * len(several), 15)
    progress.begin(*parts, Part("memory", len(measured), 20), schemes)
    rows: dict[str, dict[str, Cell]] = {}
    with Cluster(RANKS, timeout=600.0) if kinds else nullcontext() as cluster:
        for kind, names in lists.items():
            for name in progress.each(kind, names):
                candidate = _small(kind, name)
                if candidate is not None:
                    row = rows[candidate.name] = _row(candidate)
                    row |= _tried(cluster, candidate)
                    give_back()
                    yield _report(rows)
    if progress.wants("memory"):
        with Cluster(RANKS, timeout=600.0) as cluster:
            machines = KernelMachines(cluster)
            for name in progress.each("memory", measured):
                large = _small(LANGUAGE, name, LARGER)
                if large is None:
                    continue
                row = rows.setdefault(large.name, _row(large))
                try:
                    row |= _measured(cluster, machines, large.traced())
                except (TraceError, RunError) as error:
                    row["refused"] = " ".join(str(error).split())
                yield _report(rows)
    if progress.wants(SCHEMES):
        yield from _of_schemes(progress, several, rows)


def _of_schemes(
    progress: Progress, several: Sequence[Variant], rows: dict[str, dict[str, Cell]]
) -> Iterator[Report]:
    """Verifies architectures under every scheme, on each number of ranks."""
    graphs: dict[str, Graph] = {}
    todo = [(ranks, variant) for ranks in RANKS_OF_SCHEMES for variant in several]
    with ExitStack() as stack:
        clusters: dict[int, Cluster] = {}
        for ranks, variant in progress.each(SCHEMES, todo):
            if ranks not in clusters:
                stack.close()
                clusters[ranks] = stack.enter_context(Cluster(ranks, timeout=600.0))
            name = f"{variant.name}, {ranks} ranks"
            row = rows[name] = {**_row(Candidate(SCHEMES, name, {}))}
            try:
                graph = graphs.setdefault(variant.name, variant.build())
                row |= {"layers": len(graph.layers), "parameters": graph.parameters}
                worst, wrong = exact(clusters[ranks], graph, ranks)
                row |= {"exact": "NO: " + ", ".join(wrong) if wrong else "yes"}
                row["worst"] = f"{worst:.1e}"
            except Exception as error:  # one model's failure must not hide all others
                row["refused"] = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            yield _report(rows)


def _tried(cluster: Any, candidate: Candidate) -> dict[str, Cell]:
    """What tracing a model gives, and verifying it; or why it was refused."""
    began = time.perf_counter()
    try:
        with _within(MOST_S):
            graph = candidate.traced()
    except _TookTooLongError:
        return {"refused": f"not traced within {MOST_S} s"}
    except (TraceError, ModelError) as error:
        return {"refused": " ".join(str(error).split())}
    except Exception as error:  # which is a fault of the library's
        return {"refused": f"BARE {type(error).__name__}: {error}"}
    ways = [way for layer in graph.layers for way in layer.propagations]
    follow = any(not way.of_tokens for way in ways)
    return {
        "layers": len(graph.layers),
        "parameters": graph.parameters,
        "between": "cut" if follow else "whole",
        "s": round(time.perf_counter() - began, 1),
        **_verified(cluster, graph, candidate.kind),
    }


class _TookTooLongError(BaseException):
    """The time is over; no `except Exception` of a model takes it for its own."""


@contextmanager
def _within(seconds: int) -> Iterator[None]:
    """Ends the body if it takes longer."""

    def end(*_: object) -> None:
        raise _TookTooLongError

    before = signal.signal(signal.SIGALRM, end)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def _verified(cluster: Cluster, graph: Graph, kind: str) -> dict[str, Cell]:
    """What `cluster.verify` says of a model under two plans, or three of a language model."""
    needed = 8 * COPIES * (RANKS + 1) * graph.parameters
    if needed > psutil.virtual_memory().available:
        return {"exact": f"not tried: {needed / 2**30:.0f} GiB of memory are needed"}
    worst = 0.0
    exact = True
    plans = [Plan.data_parallel(graph, RANKS, (2, 1)), Plan.hybrid(graph, RANKS, RANKS)]
    if kind == LANGUAGE:
        plans.append(Plan.filters(graph, RANKS, (2, 1)))
    for plan in plans:
        try:
            synchronized = plan.with_batch_norm("synchronized")
            found = cluster.verify(synchronized, precision="fp64", repeat=False)
        except Exception as error:  # one model's failure must not hide all others
            return {"exact": f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"}
        worst = max(worst, *(difference.error for difference in found.differences))
        exact = exact and found.exact
    return {"exact": "yes" if exact else "NO", "worst": f"{worst:.1e}"}


def _measured(cluster: Cluster, machines: KernelMachines, graph: Graph) -> dict[str, Cell]:
    """How far predicted peaks are off, and whether all traffic is the recorded one."""
    found: dict[str, Cell] = {"traffic": "equal"}
    data = Synthetic(samples=RANKS * ROWS * STEPS, classes=graph.num_classes)
    for name, plan in (
        ("data parallel", Plan.data_parallel(graph, RANKS)),
        ("hybrid", Plan.hybrid(graph, RANKS)),
    ):
        experiment = Experiment(
            plan=plan, data=data, batch_size=RANKS * ROWS, optimizer=MOMENTUM, steps=STEPS
        )
        seen = cluster.call(STEPPING, experiment)
        prediction = predict(plan, machines.of(experiment), experiment)
        cells = memory_cells(Case(name, experiment), prediction, None, seen)
        found[f"memory, {name}"] = cells["memory error"]
        if not is_traffic_equal(prediction, seen):
            found["traffic"] = "NOT EQUAL"
    return found


def _row(candidate: Candidate) -> dict[str, Cell]:
    blank = dict.fromkeys(
        (
            *("layers", "parameters", "between", "s", "exact", "worst", "refused"),
            *(*OF_MEMORY, "traffic"),
        ),
        "-",
    )
    return {"model": candidate.name, "kind": candidate.kind, **blank}


def _report(rows: Mapping[str, Mapping[str, Cell]]) -> Report:
    figures: dict[str, Figure] = {}
    notes: list[str] = []
    for kind in (LANGUAGE, IMAGES):
        those = [row for row in rows.values() if row["kind"] == kind]
        if not those:
            continue
        traced = [row["refused"] == "-" for row in those]
        figures[f"traced_{kind}"] = Figure.of([float(one) for one in traced])
        cut = Counter(str(row["between"]) for row in those)["cut"]
        notes.append(
            f"{kind}: {sum(traced)} of {len(those)} are traced, {sum(traced) / len(those):.0%}; "
            f"of {cut}, operations between linear layers can be cut, as attention by heads."
        )
        tried = [row for row in those if not str(row["exact"]).startswith(("-", "not tried"))]
        if tried:
            exact = [float(row["exact"] == "yes") for row in tried]
            figures[f"exact_{kind}"] = Figure.of(exact)
            notes.append(f"{kind}: {sum(exact):.0f} of {len(tried)} verified are exact.")
    under = [row for row in rows.values() if row["kind"] == SCHEMES]
    if under:
        right = [float(row["exact"] == "yes") for row in under]
        figures["exact_schemes"] = Figure.of(right)
        notes.append(
            f"{sum(right):.0f} of {len(under)} architectures, with tables tied and apart, on "
            f"{' and '.join(map(str, RANKS_OF_SCHEMES))} ranks, are exact under every scheme: "
            "unequal shares, on 3 ranks one of them 0, dropout on, "
            f"{STEPS_OF_SCHEMES} updates in fp64."
        )
    off = [float(row[plan]) for row in rows.values() for plan in OF_MEMORY if row[plan] != "-"]
    if off:
        figures |= {"memory_error_median": Figure.of(off)}
        figures |= {"memory_error_worst": Figure(max(off), max(off), max(off))}
        equal = [float(row["traffic"] == "equal") for row in rows.values() if row["traffic"] != "-"]
        figures |= {"traffic_exact": Figure.of(equal)}
        notes.append(
            f"Memory: predicted peaks of {len(off)} cases are {statistics.median(off):.2%} off in "
            f"the median, {max(off):.2%} at most; traffic is the recorded one in "
            f"{sum(equal):.0f} of {len(equal)} models."
        )
    checked = [row for row in rows.values() if row["worst"] != "-"]
    bars = [(str(row["model"]), float(row["worst"])) for row in checked]
    notes.append(
        f"Verified on {RANKS} engines in fp64: data parallel with rows 2 : 1, Plan.hybrid, "
        "and language models with all layers cut 2 : 1. "
        "Models that cannot be built small, or need a package that is not there, are left out."
    )
    chart = Chart(
        "worst relative error, fp64",
        tuple(Bar(name, worst, worst, worst, ours=True) for name, worst in bars),
        target=1e-10,
    )
    return Report("packages", tuple(rows.values()), figures, tuple(notes), (chart,))


def _names(kind: str, quick: bool) -> list[str]:
    """The types of transformers with a causal language model; the modules of timm.

    Raises:
        ImportError: the package is not installed.
    """
    library = _library(kind)
    if quick:
        return list(QUICK[kind])
    if kind == LANGUAGE:
        return sorted(library.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    return sorted(library.list_modules())


def _library(kind: str) -> Any:
    torchvision()  # which both import
    try:
        return importlib.import_module({LANGUAGE: "transformers", IMAGES: "timm"}[kind])
    except ImportError as error:
        raise ImportError(f"{error}: pip install 'parallel-workbench[models]'") from error


def _small(kind: str, name: str, larger: int = 1) -> Candidate | None:
    """A small model, or one so many times as wide; None: there is none that torch itself runs."""
    try:
        return _language(name, larger) if kind == LANGUAGE else _images(name)
    except Exception:  # whatever a package raises for sizes that do not fit each other
        return None


def _language(name: str, larger: int) -> Candidate | None:
    transformers = _library(LANGUAGE)
    default = transformers.AutoConfig.for_model(name)
    fields = {
        field: small * larger if small >= LEAST_WIDTH else small
        for small, names in _SMALL
        for field in names
        if isinstance(getattr(default, field, None), int | None) and hasattr(default, field)
    }
    fields["use_cache"] = False
    config = transformers.AutoConfig.for_model(name, **fields)
    with torch.device("meta"):
        size = _size(transformers.AutoModelForCausalLM.from_config(config))
    if size > MOST_PARAMETERS:
        return None
    module = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        module(torch.zeros(2, TOKENS * larger, dtype=torch.long))
    given = {"config": fields, "head": "CausalLM"}
    shape = {"input_shape": (TOKENS * larger,), "vocabulary": VOCABULARY * larger}
    return Candidate(LANGUAGE, f"transformers/{name}", given | shape)


def _images(module: str) -> Candidate | None:
    timm = _library(IMAGES)
    models = timm.list_models(module=module)
    if not models:
        return None
    few = sorted(models, key=_called_small)[:SHORTLIST]
    name = min(few, key=partial(_weight, timm))
    for size in _IMAGE_SIZES[_of_batches(timm.create_model(name, num_classes=10)) :]:
        for given in ({}, {"img_size": size}):
            build = partial(timm.create_model, name, num_classes=10, **given)
            if _runs(build, size):
                less = {"depth": FEW_BLOCKS}
                if _size(build()) > LARGE and _runs(partial(build, **less), size):
                    given = given | less
                shape = {"input_shape": (3, size, size), "num_classes": 10}
                return Candidate(IMAGES, f"timm/{name}", given | shape)
    return None


def _weight(timm: Any, name: str) -> float:
    """The parameters of a model."""
    try:
        with torch.device("meta"):
            return _size(timm.create_model(name, num_classes=10))
    except Exception:  # whatever it is that a model does with values as it is built
        return math.inf


def _of_batches(module: nn.Module) -> bool:
    """Whether it has batch norms: of few numbers each, they let rounding grow."""
    return any("BatchNorm" in type(part).__name__ for part in module.modules())


def _called_small(name: str) -> tuple[int, str]:
    places = [place for place, word in enumerate(_CALLED_SMALL) if word in name]
    return min(places, default=len(_CALLED_SMALL)), name


def _runs(build: Callable[[], nn.Module], size: int) -> bool:
    """Whether torch itself gives classes for two images of this size."""
    try:
        with torch.no_grad():
            return bool(build().eval()(torch.zeros(2, 3, size, size)).shape == (2, 10))
    except Exception:  # whatever it is that a model raises for images that are too small
        return False


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
