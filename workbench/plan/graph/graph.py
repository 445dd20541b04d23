"""The order of a split model's parameters: that of its modules, as `state_dict` has them.

What a model reads: one tensor, or several by the names of forward's parameters.

A model as a value: its layers in execution order, with shapes, FLOPs and bytes.

Shapes never contain the batch dimension: `output_shape` is that of one sample. How a value depends
on the batch is given by `rows`, the rows of dimension 0 for each sample:

    rows = 1    a batch of B samples gives a tensor [B, *output_shape]
    rows = c    it gives [c B, *output_shape], the c rows of a sample adjacent (Swin's windows)
    rows = 0    no dependence on the batch: a parameter, a constant, or a size
"""

import hashlib
import math
from collections.abc import Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

from workbench.plan.graph.saved import Propagation, Saved
from workbench.plan.io.errors import unknown
from workbench.plan.io.html import Markup, element, frame_of, save, table

if TYPE_CHECKING:
    import pandas


def trainable_names(
    layers: Iterable[tuple[str, Sequence[tuple[str, tuple[str, ...]]]]],
) -> tuple[str, ...]:
    """The names of layers' trained parameters, in the order of a split model's modules.

    Args:
        layers: each layer's name, and (name, further names) of each of its trained parameters.
    """
    modules = _Modules()
    chosen = list(layers)
    aliases = {alias: name for _, weights in chosen for name, others in weights for alias in others}
    for layer, weights in chosen:
        modules.add(layer)
        mine = [(name, name) for name, _ in weights]
        borrowed = [pair for pair in aliases.items() if pair[0].startswith(f"{layer}.")]
        for path, name in [*borrowed, *mine]:
            module, _, leaf = path.rpartition(".")
            modules.add(module)[leaf] = name
    return tuple(dict.fromkeys(modules.names()))  # a tied weight has its first place


class _Modules:
    """The modules of a model: each one's weights, then its children, in order of appearance."""

    def __init__(self) -> None:
        self.own: dict[str, dict[str, str]] = {"": {}}
        self.children: dict[str, list[str]] = {"": []}

    def add(self, path: str) -> dict[str, str]:
        """The weights of a module, which is added with the modules around it if it is new."""
        if path not in self.own:
            around = path.rpartition(".")[0]
            self.add(around)
            self.children[around].append(path)
            self.own[path], self.children[path] = {}, []
        return self.own[path]

    def names(self, path: str = "") -> list[str]:
        """The weights of a module and its children."""
        found = list(self.own[path].values())
        for child in self.children[path]:
            found += self.names(child)
        return found


_INT64 = 8


@dataclass(frozen=True)
class Input:
    """One tensor that a model reads for each sample.

    Attributes:
        shape: the shape of one sample; () for a number.
        dtype: "float32" (real numbers, in the experiment's precision), "int64" (whole numbers) or
            "bool" (a mask).
        vocabulary: of whole numbers, how many there are, 0 to `vocabulary - 1`: tokens, positions,
            or 2 for a mask of zeros and ones. It makes the numbers "int64"; None: they are not
            whole.
        name: the name of forward's parameter, where the model's inputs have been named; "": the
            model reads one, its first.

    Raises:
        ValueError: a shape with other lengths than whole numbers from 1, an unknown dtype, or whole
            numbers without a vocabulary.
    """

    shape: tuple[int, ...]
    dtype: str = "float32"
    vocabulary: int | None = None
    name: str = ""

    def __post_init__(self) -> None:
        given = self.vocabulary
        if given is not None and (not isinstance(given, int) or given < 1):
            raise ValueError(f"vocabulary is the number of tokens, 1 or more, got {given!r}")
        object.__setattr__(self, "shape", tuple(self.shape))
        if not all(isinstance(length, int) and length > 0 for length in self.shape):
            raise ValueError(
                f"the shape of an input is one sample's without the batch, such as (3, 32, 32), "
                f"got {self.shape}"
            )
        if given is not None and self.dtype == "float32":
            object.__setattr__(self, "dtype", "int64")
        if self.dtype not in ("float32", "int64", "bool"):
            raise ValueError(
                f"the dtype of an input is 'float32' (real numbers in the experiment's precision), "
                f"'int64' or 'bool', got {self.dtype!r}"
            )
        if (self.dtype == "int64") != (given is not None):
            raise ValueError(
                f"an input of whole numbers says how many there are, "
                f"Input({self.shape}, vocabulary=2) for 0 and 1; got dtype {self.dtype!r} and "
                f"vocabulary {given}"
            )

    @property
    def is_real(self) -> bool:
        """Whether it is real numbers."""
        return self.dtype == "float32"

    def itemsize(self, real: int) -> int:
        """The bytes of an element, where a real number has so many."""
        return {"float32": real, "int64": _INT64, "bool": 1}[self.dtype]

    def __str__(self) -> str:
        kind = {"float32": "", "bool": " bool"}.get(self.dtype, f" of {self.vocabulary} tokens")
        return "x".join(map(str, self.shape)) + kind if self.shape else f"a number{kind}"


def sample_bytes(inputs: Sequence[Input], real: int) -> int:
    """The bytes of one sample of all inputs, where a real number has so many."""
    return sum(math.prod(one.shape) * one.itemsize(real) for one in inputs)


def plain_input(inputs: Sequence[Input]) -> Input | None:
    """The one tensor of a model that reads its first parameter, as most do; None: it does not."""
    first, *others = inputs
    return None if others or first.name or first.dtype == "bool" else first


def shown(inputs: Sequence[Input]) -> str:
    """What one sample is, for people: "3x32x32", or "image 3x32x32, mask 16 bool"."""
    return ", ".join(f"{one.name} {one}".lstrip() for one in inputs)


T = TypeVar("T")

# What one layer does, and so which placements it can be given (`plan/placement/rules.py`).
KINDS = (
    "conv2d",
    "linear",
    "embedding",  # the rows of a table at whole numbers: [B, ...] -> [B, ..., features]
    "attention",  # self-attention: tokens in, tokens of the same shape out, head by head
    "batch_norm",
    "layer_norm",
    "dropout",
    "stochastic_depth",
    "elementwise",  # one tensor in, same shape out, element by element: ReLU, GELU, identity ...
    "pool",  # one tensor in, acts on each channel by itself
    "flatten",  # flattens every dimension after the batch: [B, C, ...] -> [B, C * ...]
    "add",  # two tensors, broadcast only over trailing dimensions of size 1
    "mul",
    "parameter",  # a parameter or buffer read directly (`get_attr`)
    "size",  # a value that is no tensor: x.shape[0], arithmetic on it
    "op",  # anything else: acts on each sample by itself, as far as we know
)

# The role of a tensor that a model returns. Auxiliary heads are trained with the prediction, at a
# smaller weight; an unused tensor has no part in the loss.
ROLES = ("prediction", "auxiliary", "unused")


@dataclass(frozen=True)
class Weight:
    """One parameter or buffer.

    Attributes:
        name: the weight's name in the model's `state_dict`.
        shape: the shape of the whole tensor.
        dtype: the element type: "float32", "int64", ...
        trainable: whether it is a parameter that receives a gradient in training.
        frozen: whether it is a parameter that receives none: its `requires_grad` is off, forward
            does not use it, or its user is detached. A weight that is neither trainable nor frozen
            is a buffer.
        persistent: whether it is in the model's `state_dict`; some buffers are not.
        aliases: the further names of the same tensor in the `state_dict` (tied weights).
    """

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"
    trainable: bool = True
    frozen: bool = False
    persistent: bool = True
    aliases: tuple[str, ...] = ()

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Layer:
    """One operation of the model.

    Attributes:
        name: the module's path ("classifier.0"), or for a function the traced node's name.
        kind: the layer's kind, one of `KINDS`.
        inputs: the names of the layers whose outputs it reads, in argument order; "input" is the
            model's input, of several "input.NAME".
        input_shape: the shape of its first tensor input for one sample.
        output_shape: the shape of its output for one sample.
        rows: the rows of dimension 0 for each sample (0: independent of the batch).
        weights: the layer's parameters and buffers.
        flops: the floating-point operations of the forward pass for one sample (a multiply-add is
            2); None: not known.
        activation_bytes: the bytes of its output for one sample.
        unreal_bytes: the bytes of an element of its output if that is no real number; else 0.
        groups: the groups of a convolution, else 1.
        heads: the heads of an attention layer, else 0.
        num_embeddings: the rows of an embedding's table, else 0.
        transposed: whether a linear layer holds its matrix as [in_features, out_features].
        output_units: the equal pieces in which what follows may have a linear layer's features, as
            the heads of a query; 0: any.
        output_blocks: the equal blocks of these features that are cut alike, as of query and key.
        input_units: the equal pieces in which a linear layer's input may come; 0: any.
        propagations: the ways in which an operation of no other kind may be cut.
        saved: the tensors that autograd saves, if the kind does not say so; None: not known.
        target: the function or module that is called: "torch.nn.Conv2d", "operator.add" ...
        node: the name of the traced node.
        shared: the layer that owns the weights, if the module is called more than once; else "".
        draws: the dimension of each random tensor that a call draws, in order, along which the rows
            of a sample are adjacent; -1: the tensor does not depend on the batch.
        least_rows: the fewest rows of a batch that it takes in training
            (`plan/experiment/checks.py`); 0: any number, even none.
        least_rows_half: the fewest rows under autocast to bf16 or fp16; 1 where the output's type
            differs without rows, as in torch's LSTM.
        uncounted: whether it does more floating-point operations than `flops`, since some could not
            be counted.
        evaluating: whether its module is in eval mode while the model trains, and so computes
            differently: a batch norm with its running statistics.
        detached: whether no gradient flows back to its output, though weights at or above it are
            trained: it is detached, not differentiable, or read only by such layers.
    """

    name: str
    kind: str
    inputs: tuple[str, ...]
    input_shape: tuple[int, ...]
    output_shape: tuple[int, ...]
    rows: int = 1
    weights: tuple[Weight, ...] = ()
    flops: int | None = 0
    activation_bytes: int = 0
    groups: int = 1
    heads: int = 0
    target: str = ""
    node: str = ""
    shared: str = ""
    draws: tuple[int, ...] = ()
    least_rows: int = 0
    least_rows_half: int = 0
    uncounted: bool = False
    evaluating: bool = False
    detached: bool = False
    num_embeddings: int = field(default=0, repr=False)
    transposed: bool = field(default=False, repr=False)
    output_units: int = field(default=0, repr=False)
    output_blocks: int = field(default=1, repr=False)
    input_units: int = field(default=0, repr=False)
    propagations: tuple[Propagation, ...] = field(default=(), repr=False)
    unreal_bytes: int = field(default=0, repr=False)
    saved: Saved | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.uncounted and not self.flops:
            object.__setattr__(self, "flops", None)

    def within(self, weight: Weight) -> str:
        """The name of a weight in this layer: "weight", "bias", "out_proj.weight"."""
        return weight.name.removeprefix(f"{self.name}.")

    @property
    def calls_module(self) -> bool:
        """Whether it is a module of the model, and no function or method."""
        return bool(self.weights) or self.target.rpartition(".")[2][:1].isupper()

    @property
    def of_type(self) -> bool:
        """Whether it is a tensor's type or device, which all pieces of it have alike."""
        return self.target in ("Tensor.dtype", "Tensor.device")

    @property
    def counted_flops(self) -> int:
        """The FLOPs that are known: 0 where none are."""
        return self.flops or 0

    @property
    def flops_text(self) -> str:
        """Millions of FLOPs for people; "unknown", or what is known of them "or more"."""
        if self.flops is None:
            return "unknown"
        return f"{self.flops / 1e6:,.2f}" + " or more" * self.uncounted

    @property
    def random(self) -> bool:
        """Whether it draws random numbers."""
        return bool(self.draws)

    @cached_property
    def parameters(self) -> int:
        """Number of trainable elements; those of frozen parameters are not counted."""
        return sum(weight.numel for weight in self.weights if weight.trainable)

    @property
    def of_batch(self) -> bool:
        """Whether it is a batch norm that uses the statistics of the current batch in training."""
        return self.kind == "batch_norm" and not self.evaluating

    @property
    def keeps_weight(self) -> bool:
        """Whether its weight is a frozen parameter, so that its gradient is not computed."""
        return any([weight.frozen for weight in self.weights[:1]])


@dataclass(frozen=True)
class Source:
    """The origin of a model, from which every rank can build the same one.

    Attributes:
        kind: the kind of origin: "torchvision" (built by name) or "module" (the user's own
            nn.Module).
        name: the builder's name ("vgg11"), or the module's class.
        arguments: the keyword arguments of the builder, sorted by name.
        skeleton: the traced module without its values, compressed; not part of equality, and not
            saved in text. None: of a model that has a name, it is traced again.
        module: the user's own nn.Module, where it was traced in this process; it does not travel.
        frozen: the names of the module's parameters whose `requires_grad` was off when it was
            traced; None: not known.
    """

    kind: str
    name: str
    arguments: tuple[tuple[str, Any], ...] = ()
    skeleton: bytes | None = field(default=None, compare=False, repr=False)
    module: Any = field(default=None, compare=False, repr=False)
    frozen: frozenset[str] | None = field(default=None, compare=False, repr=False)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "module": None}


@dataclass(frozen=True)
class Graph:
    """A traced model: layers in execution order.

    Attributes:
        source: the origin of the model.
        inputs: what it reads: one tensor, or several, each with its name.
        num_classes: the features of the first output.
        layers: the operations of the model, in execution order.
        outputs: the names of the layers whose outputs are trained on; the first is the prediction,
            further ones are auxiliary heads used by the loss in training.
        roles: the role of each tensor that the model returns, in order, out of `ROLES`.
        keys: where the model itself returns each of `outputs`: its key in a dict, or its place in a
            tuple, not counting unused tensors; (): in this order, or as a single tensor.
        evaluation: the model in evaluation mode, where its layers differ from those in training
            (`if self.training`, functional dropout, auxiliary heads); None: the same layers.
        least_batch: the fewest samples of a batch for which the model does what was recorded: 2
            where its forward pass decides otherwise for a single one.
    """

    source: Source
    inputs: tuple[Input, ...]
    num_classes: int
    layers: tuple[Layer, ...]
    outputs: tuple[str, ...]
    roles: tuple[str, ...] = ("prediction",)
    evaluation: "Graph | None" = None
    least_batch: int = 1
    keys: tuple[int | str, ...] = ()

    def __getstate__(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in fields(self)}  # without cached values

    @cached_property
    def _by_name(self) -> MappingProxyType[str, Layer]:
        return MappingProxyType({layer.name: layer for layer in self.layers})

    @cached_property
    def sources(self) -> MappingProxyType[str, Input]:
        """The inputs by the names under which layers read them; no layer has such a name."""
        if len(self.inputs) == 1:
            return MappingProxyType({"input": self.inputs[0]})
        return MappingProxyType({f"input.{one.name}": one for one in self.inputs})

    @property
    def input_shape(self) -> tuple[int, ...]:
        """The shape of one sample; a ValueError of a model that reads several inputs."""
        return self._only.shape

    @property
    def vocabulary(self) -> int | None:
        """The number of tokens of token ids, else None; a ValueError as above."""
        return self._only.vocabulary

    @property
    def _only(self) -> Input:
        if len(self.inputs) > 1:
            raise ValueError(f"{self.source.name} reads {', '.join(self.sources)}: see `inputs`")
        return self.inputs[0]

    def shape_of(self, name: str) -> tuple[int, ...]:
        """The shape of one sample of a layer's output, or of an input by its name in `sources`."""
        return self.sources[name].shape if name in self.sources else self[name].output_shape

    def rows_of(self, name: str) -> int:
        """The rows of dimension 0 for each sample, of the same."""
        return 1 if name in self.sources else self[name].rows

    @cached_property
    def shares_weights(self) -> frozenset[str]:
        """The layers that use weights with another: a module called twice, or tied weights."""
        users = [layer for layer in self.layers if layer.shared]
        return frozenset(name for layer in users for name in (layer.name, layer.shared))

    @cached_property
    def consumers(self) -> MappingProxyType[str, tuple[str, ...]]:
        """The layers that read the output of each layer (and of each input), in order."""
        readers: dict[str, list[str]] = {name: [] for name in self.sources}
        for layer in self.layers:
            readers.setdefault(layer.name, [])
            for name in dict.fromkeys(layer.inputs):
                readers[name].append(layer.name)
        return MappingProxyType({name: tuple(names) for name, names in readers.items()})

    def __getitem__(self, name: str) -> Layer:
        """The layer of this name.

        Raises:
            KeyError: no layer has this name; the nearest names are suggested.
        """
        try:
            return self._by_name[name]
        except KeyError:
            raise KeyError(unknown("layer", name, self._by_name, of=self.source.name)) from None

    @cached_property
    def owners(self) -> MappingProxyType[str, str]:
        """The layer that each weight belongs to."""
        return MappingProxyType(
            {w.name: layer.name for layer in self.layers for w in layer.weights}
        )

    @cached_property
    def alike(self) -> MappingProxyType[str, int]:
        """A number for each layer, equal for equal computations, whatever is read or cut how."""
        numbers: dict[Hashable, int] = {}
        found = {}
        for layer in self.layers:
            owner = self[layer.shared] if layer.shared else layer
            look = (
                (layer.kind, layer.target, layer.groups, layer.heads, layer.flops, layer.draws),
                (layer.input_shape, layer.output_shape, layer.rows, bool(layer.shared)),
                (layer.evaluating, layer.detached, layer.propagations, layer.saved),
                (layer.output_units, layer.output_blocks, layer.input_units),
                tuple((weight.shape, weight.trainable) for weight in owner.weights),
            )
            found[layer.name] = numbers.setdefault(look, len(numbers))
        return MappingProxyType(found)

    def arranged(self, outputs: Sequence[T]) -> T | tuple[T, ...] | dict[str, T]:
        """Returns outputs as the model itself returns them, without unused ones.

        Args:
            outputs: one value for each of `self.outputs`.
        """
        if not self.keys:
            return outputs[0] if len(outputs) == 1 else tuple(outputs)
        by_key = dict(zip(self.keys, outputs, strict=True))
        if isinstance(self.keys[0], int):
            return tuple(by_key[place] for place in range(len(outputs)))
        return {str(key): output for key, output in by_key.items()}

    @property
    def scores_tokens(self) -> bool:
        """Whether it predicts a class for each of its tokens: scores [tokens, classes]."""
        shape = self[self.outputs[0]].output_shape
        tokens = [one.shape for one in self.inputs if one.vocabulary is not None]
        return len(shape) > 1 and bool(tokens) and (len(self.inputs) == 1 or shape[:-1] in tokens)

    @property
    def label_shape(self) -> tuple[int, ...]:
        """The shape of one sample's labels: of tokens, classes are the last dimension of scores."""
        shape = self[self.outputs[0]].output_shape
        return shape[:-1] if self.scores_tokens else shape[1:]

    @cached_property
    def trainable(self) -> tuple[str, ...]:
        """The names of the trained parameters, in the order of a split model's modules.

        Buckets follow this order.
        """
        return trainable_names(
            (layer.name, [(w.name, w.aliases) for w in layer.weights if w.trainable])
            for layer in self.layers
        )

    @cached_property
    def learning(self) -> frozenset[str]:
        """The layers to whose output a gradient flows back in training: the same on every rank."""
        found: set[str] = set()
        for layer in self.layers:
            owner = self[layer.shared] if layer.shared else None
            if not layer.detached and carries_gradient(layer, owner, found):
                found.add(layer.name)
        return frozenset(found)

    @cached_property
    def parameters(self) -> int:
        """Number of trainable elements of the whole model."""
        return sum(layer.parameters for layer in self.layers)

    @cached_property
    def frozen(self) -> int:
        """Number of elements of parameters that receive no gradient."""
        return sum(w.numel for layer in self.layers for w in layer.weights if w.frozen)

    @property
    def size_text(self) -> str:
        """The number of parameters as text."""
        frozen = f" and {self.frozen:,} frozen" if self.frozen else ""
        return f"{self.parameters:,}{' trained' if frozen else ''}{frozen} parameters"

    @cached_property
    def flops(self) -> int:
        """Floating-point operations of one sample's forward pass, without those of `uncounted`."""
        return sum(layer.counted_flops for layer in self.layers)

    @cached_property
    def uncounted(self) -> tuple[str, ...]:
        """The names of layers that do more floating-point operations than are known."""
        return tuple(layer.name for layer in self.layers if layer.uncounted)

    @cached_property
    def fingerprint(self) -> str:
        """Twelve hexadecimal digits that change when anything about the layers changes."""
        evaluating = self.evaluation.fingerprint if self.evaluation else ""
        layers, outputs, plain = self.layers, self.outputs, plain_input(self.inputs)
        shape = self.inputs if plain is None else plain.shape
        more = f", {plain.vocabulary} tokens" if plain and plain.vocabulary else ""
        more += f", {self.least_batch} samples" if self.least_batch > 1 else ""
        units = [(one.output_units, one.output_blocks, one.input_units) for one in layers]
        ways = [layer.propagations for layer in layers]
        more += f", {units}, {ways}" if any(ways) else ""
        more += f", {self.keys}" if self.keys else ""
        content = repr((self.source, shape, layers, outputs, self.roles, evaluating)) + more
        return hashlib.sha256(content.encode()).hexdigest()[:12]

    def to_frame(self) -> "pandas.DataFrame":
        """One line for each layer: shapes of one sample, elements, FLOPs (None: unknown), bytes."""
        lines = [_line(layer) for layer in self.layers]
        return frame_of(lines, tuple(lines[0]))

    def save(self, path: str | Path) -> None:
        """Writes its table into a file: "x.html" or "x.csv".

        Raises:
            ValueError: the name has another ending.
        """
        save(self, path)

    def _repr_html_(self) -> Markup:
        return _as_html(self)

    def __repr__(self) -> str:
        more = f" without those of {', '.join(self.uncounted)}" if self.uncounted else ""
        return (
            f"<Graph {self.source.name}: {len(self.layers)} layers, "
            f"{self.size_text}, {self.flops / 1e9:.3g} GFLOP per sample{more}>"
        )


def carries_gradient(layer: Layer, owner: Layer | None, learning: Collection[str]) -> bool:
    """Whether a layer's output may carry a gradient: something at or above it is trained.

    Args:
        owner: the layer that owns its weights; None: its own.
        learning: the names of the layers before it whose outputs carry a gradient.
    """
    if layer.kind == "size":
        return False
    weights = layer.weights if owner is None else (*layer.weights, *owner.weights)
    return any([w.trainable for w in weights]) or any([name in learning for name in layer.inputs])


def _line(layer: Layer) -> dict[str, Any]:
    return {
        "layer": layer.name,
        "kind": layer.kind,
        "inputs": layer.inputs,
        "input_shape": layer.input_shape,
        "output_shape": layer.output_shape,
        "parameters": layer.parameters,
        "flops": None if layer.uncounted else layer.flops,
        "activation_bytes": layer.activation_bytes,
    }


def _as_html(graph: Graph) -> Markup:
    """The layers that hold parameters, as a table."""
    head = ("layer", "kind", "input", "output", "parameters", "MFLOP", "activation KB")
    rows = (
        (
            layer.name,
            layer.kind,
            "x".join(map(str, layer.input_shape)),
            "x".join(map(str, layer.output_shape)),
            f"{layer.parameters:,}",
            layer.flops_text,
            f"{layer.activation_bytes / 1e3:,.1f}",
        )
        for layer in graph.layers
        if layer.parameters or layer.uncounted
    )
    more = f" FLOPs of {', '.join(graph.uncounted)} are not known." if graph.uncounted else ""
    told = (
        f": {graph.size_text}, {graph.flops / 1e6:,.0f} MFLOP for one sample of "
        f"{shown(graph.inputs)} (forward).{more}"
    )
    line = element("p", element("b", graph.source.name), told)
    return element("div", line, table(head, rows))
