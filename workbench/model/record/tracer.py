"""A tracer with values: each operation runs on fake tensors as it is recorded.

`torch.fx` runs a module's forward on proxies and records their operations. Here each proxy also
knows its value, without memory, at two batch sizes. A value that is the same at both is passed to
the user's code as it is: `x.shape[1] == 3`, `range(x.ndim)` and `for part in x.chunk(3, 1)` work,
and only what depends on the batch stays symbolic. A wrong shape fails at the user's own line.
"""

import operator
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import is_dataclass
from functools import partial
from types import FunctionType, MethodType
from typing import Any, cast

import numpy as np
import torch
import torch.fx
from torch import Tensor, nn
from torch.fx import Node, Proxy
from torch.fx.node import map_arg
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils.parametrize import is_parametrized

from workbench.model.build import with_tensors
from workbench.model.errors import TraceError
from workbench.model.record.attention import is_window_attention, written_out
from workbench.model.record.batch import (
    BATCHES,
    REMEDY,
    Context,
    Under,
    called,
    depends_on_batch,
    elsewhere,
    has_tensors,
    name_of,
    rows_and_shape,
    tensors,
)
from workbench.model.record.draws import dims_of
from workbench.model.record.extended import ExtendedLayers
from workbench.model.record.failure import MAX_NORM, OF_ANOTHER_TRACE, Refused, noted
from workbench.model.record.in_place import changes_in_place, read_what_was_changed
from workbench.model.record.inputs import KNOWN, parameters_of, without_objects
from workbench.model.record.patches import (
    RecordedFactories,
    autocast_watched,
    by_kernels,
    checkpoints_left_out,
    limits_recorded,
    modes,
    momentum_known,
    quiet,
    refuse_other_draws,
    sizes_as_tuples,
    transformers_as_trained,
)
from workbench.model.record.proxy import Sizes, ValueProxy, decided_alike, is_reshape, stated
from workbench.model.record.runs import Ran, Runs
from workbench.model.record.state import (
    Attributes,
    ModelFakes,
    Pass,
    attributes_of,
    line_of_model,
    refuse_backward_hooks,
    refuse_set,
    show_no_state,
)
from workbench.model.weights.files import TORCH_DTYPES
from workbench.plan.graph.graph import Input

_STATE = (
    "Each rank would have its own value, so forward must not change what the model holds, except "
    "the statistics of nn.BatchNorm. Compute without writing, as in "
    "w = self.weight.clamp(-1, 1); F.linear(x, w). Build a norm with track_running_stats=False, "
    "and keep a spectral norm in eval mode, layer.eval(). What is made once must be there before: "
    "call model(x) first"
)
# Modules of torch's own whose parts are layers of their own.
_OF_PARTS = {
    nn.Transformer,
    nn.TransformerEncoder,
    nn.TransformerEncoderLayer,
    nn.TransformerDecoder,
    nn.TransformerDecoderLayer,
}
_FINFO = torch.finfo  # which is patched while a model is traced
_DTYPES: dict[type, torch.dtype] = {int: torch.int64, float: torch.float64, bool: torch.bool}


class ValueTracer(torch.fx.Tracer):
    """Records a module's forward on one batch of inputs.

    Each node's `meta` has `values` (the value at both batch sizes), `depends` (on the input's
    values), `rows` and `shape` (of one sample), `flops` (of one sample), `uncounted` (whether it
    does more than these), `draws` (the dimension of the batch in each random tensor that it
    draws), and for errors `line` (of the model's code) and `module` (the path of the submodule at
    work).

    Args:
        given: the inputs; where they have no names there is one, forward's first.
        whole: the classes of modules that are one operation each, and not traced into.
        written_out: the paths of attention that is recorded operation by operation.
        known: the results of operations in other passes of the same model (`Runs`).
    """

    proxy_buffer_attributes = True

    def __init__(
        self,
        given: Sequence[Input],
        whole: Collection[type[nn.Module]] = frozenset(),
        written_out: frozenset[str] = frozenset(),
        known: dict[Hashable, Ran] | None = None,
    ) -> None:
        super().__init__()
        self.given, self.whole, self.mode = tuple(given), whole, ModelFakes(self._refuse_write)
        self.written_out = written_out
        self.known: dict[Hashable, Ran] = {} if known is None else known
        self._runs = Runs(self.mode, self.known)
        with self.mode:
            self._batches = [
                tuple(torch.empty(b, *one.shape, dtype=TORCH_DTYPES[one.dtype]) for b in BATCHES)
                for one in self.given
            ]
        self.inputs: dict[str, tuple[Tensor, ...]] = {}  # by the names of forward's parameters
        self.names: dict[int, str] = {}
        self.read: dict[str, ValueProxy] = {}
        self.extended = ExtendedLayers()
        self.without_autocast: list[str] = []
        self.running = False
        self.least_batch = 1
        self.modes: tuple[bool, ...] = ()
        self.failed_in: str | None = None
        self.refused: Refused | None = None
        self.before: Attributes = {}
        self._factories = RecordedFactories(self._made)
        self._members: set[int] = set()

    def again(self, **changes: Any) -> "ValueTracer":
        """Another tracer of the same model, with what this one knows, and with changes."""
        kept = {"whole": self.whole, "written_out": self.written_out, "known": self.known}
        return ValueTracer(self.given, **kept | changes)

    @torch.inference_mode(False)
    def trace_structure(self, structure: nn.Module) -> torch.fx.Graph:
        """Traces a module whose tensors are on the meta device.

        Raises:
            TraceError: the forward pass cannot be traced.
        """
        recorded = self._recorded(structure)
        graph = recorded.graph

        def again(second: nn.Module) -> Pass:
            return self.again()._recorded(second)

        show_no_state(structure, recorded, again)
        read_what_was_changed(graph, self.root, self.record)
        return graph

    def _recorded(self, structure: nn.Module) -> Pass:
        """One forward pass of a module."""

        def fake(tensor: Tensor) -> Tensor:
            with self.mode:
                return torch.empty(tensor.shape, dtype=tensor.dtype)

        root = with_tensors(structure, fake)
        for name, tensor in [*root.named_parameters(), *root.named_buffers()]:
            self.names[id(tensor)] = name
        self.mode.hold(root)
        self.before = attributes_of(root)
        self.modes = modes()
        self._members = {id(module) for module in root.modules()}
        with (
            self._factories,
            sizes_as_tuples(),
            limits_recorded(self._made),
            refuse_other_draws(),
            transformers_as_trained(),
            autocast_watched(self.without_autocast),
            by_kernels(),
            checkpoints_left_out(),
            quiet(),
        ):
            graph = self.trace(root)
        if self.refused is not None:  # and caught by the model, which took another way then
            self.failed_in = self.refused.path
            raise self.refused.error
        for name, tensor in [*root.named_parameters(), *root.named_buffers()]:
            if self.names.get(id(tensor)) != name or self.mode.name_of(tensor) is None:
                raise TraceError(f"forward assigns another tensor to {name!r}. {_STATE}")
        if made := dict(root.named_modules()).keys() - dict(structure.named_modules()).keys():
            raise TraceError(
                f"forward makes the layer {min(made)!r}, whose weights no rank would have: make it "
                "in __init__, or call model(x) once before"
            )
        return Pass(root, graph, self.before, attributes_of(root))

    def _made(self, function: Any, args: Any, kwargs: Any) -> Any | None:
        return None if self.running else self.create_proxy("call_function", function, args, kwargs)

    @noted
    def create_proxy(
        self, kind: str, target: Any, args: Any, kwargs: Any, *_: Any, **__: Any
    ) -> Any:
        """Runs an operation; records it, unless its result is already known.

        Raises:
            TraceError: the operation is not supported.
        """
        args, kwargs = self.create_arg(args), self.create_arg(kwargs)
        sources: list[Node] = []
        map_arg((args, kwargs), sources.append)
        if any(source.graph is not self.graph for source in sources):
            raise TraceError(OF_ANOTHER_TRACE)
        if self.extended.counts(self.root, kind, target, args):
            return None
        x = self.extended.called(self.root, self._path, kind, target, args, kwargs)
        if x is not None:
            kind, target, args, kwargs = "call_module", self._path, (x,), {}
        ran: Ran | None = None
        if is_reshape(target, args, kwargs):
            ran = self._run("call_method", "view" if target == "view" else "reshape", args, {})
            kind, target, args = stated(target, args, *ran.values)
        if kind == "get_attr" and target in self.read:
            return self.read[target]
        if kind == "call_module":
            refuse_set(self.root, target, self.before)
        ran = ran or self._run(kind, target, args, kwargs)
        values = ran.values
        sources.clear()
        map_arg((args, kwargs), sources.append)
        # Equal at two batch sizes is not equal at all: n // 4 is 0 for both.
        of_batch_size = any(source.meta["is_size"] for source in sources)
        of_type = any(source.meta["of_type"] for source in sources)
        of_function = isinstance(target, FunctionType)
        for_effect = values[0] is None and target not in (getattr, operator.getitem)
        if _known(*values) and not (of_batch_size or of_type or of_function or for_effect):
            return values[0]
        line = line_of_model(ValueTracer.trace_structure.__code__)
        if (context := self._context(kind)) != Context() and tensors(values[0]):
            kind, target = "call_function", Under(target, context)
        node = self.create_node(kind, target, args, kwargs)
        node.meta.update(line=line, module=self._path)
        self._describe(node, ran)
        if ran.written and not changes_in_place(node, self.root):
            raise TraceError(
                f"{name_of(node)} writes into a tensor that it is given, and a graph would not "
                "see it: let it write into a copy of its own, x = x.clone(), and return that"
            )
        if (
            of_batch_size
            and tensors(values[0])
            and not (node.meta["rows"] or node.meta["elsewhere"])
        ):
            raise TraceError(
                f"{name_of(node)} makes a tensor of the batch's size, which differs between ranks, "
                f"that has no row for each sample. {REMEDY}"
            )
        proxy = self.proxy(node)
        if kind == "get_attr":
            self.read[target] = proxy
        if isinstance(values[0], tuple | list) and not (tensors(values[0]) or of_function):
            parts = (proxy[index] for index in range(len(values[0])))
            return Sizes(parts) if isinstance(values[0], torch.Size) else tuple(parts)
        return None if for_effect and not of_function else proxy

    def record(self, node: Node) -> None:
        """Runs a node that was made from others, and sets its `meta`."""
        self._describe(node, self._run(node.op, node.target, node.args, node.kwargs))

    def _describe(self, node: Node, ran: Ran) -> None:
        values = ran.values
        node.meta.update(values=values, flops=ran.flops, uncounted=ran.uncounted, depends=False)
        node.meta.update(learns=False, saved=None)
        # The limits of a type are the precision's, not the trace's.
        limits = isinstance(values[0], _FINFO)
        plain = isinstance(values[0], KNOWN)
        node.meta["of_type"] = limits or (
            plain and any(source.meta["of_type"] for source in node.all_input_nodes)
        )
        node.meta["is_size"] = (plain and not node.meta["of_type"]) or (
            isinstance(node.target, FunctionType) and not tensors(values[0])
        )
        node.meta["depends"] = node.op == "placeholder" or depends_on_batch(node)
        node.meta["elsewhere"] = elsewhere(node)
        away = bool(node.meta["elsewhere"])
        node.meta["rows"], node.meta["shape"] = (0, ()) if away else rows_and_shape(node)
        node.meta["draws"] = dims_of(*ran.drawn)

    @property
    def _path(self) -> str:
        """The path of the submodule at work."""
        return str(self.scope.module_path)

    def proxy(self, node: Node) -> ValueProxy:
        return ValueProxy(node, self)

    def create_arg(self, a: Any) -> Any:
        if isinstance(a, Tensor):
            if id(a) not in self.names:
                raise TraceError(
                    f"a tensor of shape {tuple(a.shape)} is used that is neither a parameter nor "
                    "a buffer of the model: register it in __init__, "
                    'self.register_buffer("name", tensor)'
                )
            return self.create_arg(self.create_proxy("get_attr", self.names[id(a)], (), {}))
        if isinstance(a, nn.Module):
            raise TraceError(
                f"the module {type(a).__name__} is passed as an argument; pass its parameters"
            )
        if isinstance(a, type) and a in _DTYPES:
            return _DTYPES[a]  # as torch.zeros(3, dtype=int) means it
        if isinstance(a, FunctionType | MethodType):
            raise TraceError(
                f"the function {a.__qualname__} is passed to an operation, which a graph cannot "
                "hold: put both into a function marked by torch.fx.wrap"
            )
        if isinstance(a, np.generic):
            return a.item()  # the code of a graph would read np, which it does not import
        if isinstance(a, torch.Generator):
            raise TraceError(
                "random numbers are drawn from a torch.Generator of the model's own, whose state "
                "ranks would not share: leave generator= out, and they follow the experiment's seed"
            )
        if isinstance(a, Sizes) or (isinstance(a, tuple) and hasattr(a, "_fields")):
            return tuple(self.create_arg(element) for element in a)
        try:
            if is_dataclass(a) and not isinstance(a, type):
                raise NotImplementedError  # torch.fx would record what makes it
            return super().create_arg(a)
        except NotImplementedError:
            raise TraceError(
                f"an object of {type(a).__module__}.{type(a).__qualname__} is returned, or given "
                "to an operation, which a graph cannot hold: return tensors, or a dict of them "
                "whose roles say which are used; of transformers, configure use_cache=False"
            ) from None

    def create_args_for_root(
        self, root_fn: Any, is_module: bool, concrete_args: Any = None
    ) -> tuple[Any, list[Any]]:
        self.inputs = dict(zip(parameters_of(self.root, self.given), self._batches, strict=True))
        proxies = [self.create_proxy("placeholder", name, (), {}) for name in self.inputs]

        def returned(root: nn.Module, *values: Any) -> Any:
            if self.given[0].name:
                return without_objects(root_fn(root, **dict(zip(self.inputs, values, strict=True))))
            return without_objects(root_fn(root, *values))

        return returned, [self.root, *proxies]

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        if type(m).__module__ == "torchvision.ops.stochastic_depth" or is_window_attention(m):
            return True
        if type(m) in self.whole:
            return True
        if module_qualified_name in self.written_out:
            return False
        if is_parametrized(m) or self._context("") != Context() or type(m) in _OF_PARTS:
            return False
        return super().is_leaf_module(m, module_qualified_name)

    def call_module(self, m: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if self.running or (id(m) not in self._members and not has_tensors(m)):
            return forward(*args, **kwargs)  # one that was made in forward is what it calls
        path = self.path_of_module(m)
        try:
            if not self.is_leaf_module(m, path):
                refuse_backward_hooks(m, path)
            if path in self.written_out:
                forward = partial(written_out, cast(nn.MultiheadAttention, m))
            return super().call_module(m, forward, args, kwargs)
        except Exception:
            self.failed_in = self.failed_in or path
            raise

    def path_of_module(self, mod: nn.Module) -> str:
        try:
            return super().path_of_module(mod)
        except NameError:
            raise TraceError(
                f"the module {type(mod).__name__} is called, but is not a submodule of the model: "
                "assign it to an attribute in __init__, or hold such modules in nn.ModuleList"
            ) from None

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        if self.running:
            return attr_val
        return super().getattr(attr, attr_val, parameter_proxy_cache)

    @noted
    def to_bool(self, obj: Proxy) -> bool:
        decided = decided_alike(obj.node)
        if decided is not None:
            self.least_batch = max(self.least_batch, decided.least_batch)
            return decided.value
        raise TraceError(
            "a decision depends on the values or the size of the batch (if, while, and, or, "
            "assert): use torch.where for a choice per element; if on the size alone, put the "
            "lines into a function marked by torch.fx.wrap"
        )

    @noted
    def refuse(self, text: str) -> None:
        """Raises an error that the model may catch, and that is raised still.

        Raises:
            TraceError: always.
        """
        raise TraceError(text)

    def _context(self, kind: str) -> Context:
        """What the operation that is being recorded is under.

        Raises:
            TraceError: a graph cannot contain it.
        """
        gradients, *autocast = modes()
        if autocast != [*self.modes[1:]]:
            raise TraceError(
                "torch.autocast in forward would be lost: the experiment's precision says what is "
                "computed in 16 bits; torch.autocast(..., enabled=False) keeps lines from it"
            )
        found = Context(gradients or not self.modes[0], not self.without_autocast)
        if kind == "call_module" and found != Context():
            raise TraceError(
                "this module is called under torch.no_grad() or without autocast, which would be "
                "lost: call it outside, and use x.detach()"
            )
        return found if kind != "get_attr" else Context()

    def _run(self, kind: str, target: Any, args: Any, kwargs: Any) -> Ran:
        """Runs an operation at both batch sizes."""
        if kind == "placeholder":
            return Ran(self.inputs[target])
        module = self._module(target) if kind == "call_module" else None
        if isinstance(module, nn.SyncBatchNorm):
            raise TraceError(
                "nn.SyncBatchNorm has its own communication: use nn.BatchNorm2d, and "
                'batch_norm="synchronized" in the plan'
            )
        held = [] if module is None else [*module.parameters(), *module.buffers()]
        were = [tensor._version for tensor in held]

        def call(given: Any, named: Any) -> Any:
            return self.call(kind, target, given, named)

        def at(size: int) -> Any:
            return map_arg((args, kwargs), lambda node: node.meta["values"][size])

        self.running = True
        try:
            with self._factories.aside():
                ran = self._runs.run(call, target, module, [at(0), at(1)])
        finally:
            self.running = False
        if isinstance(module, _BatchNorm):
            return ran
        # The schema of torch's batch norm does not say that it writes.
        written = [one for one, was in zip(held, were, strict=True) if one._version != was]
        for name in filter(None, map(self.mode.name_of, [*written, *ran.written])):
            self._refuse_write(name)
        return ran

    def _refuse_write(self, name: str, operation: str = "") -> None:
        if "embedding_renorm" in operation:
            self.refuse(f"the embedding of {name!r} changes {MAX_NORM}")
        self.refuse(f"forward writes into {name!r}, which belongs to the model. {_STATE}")

    def call(self, kind: str, target: Any, args: Any, kwargs: Any) -> Any:
        """Runs an operation on fake tensors."""
        module = self._module(target) if kind == "call_module" else None
        with momentum_known(module), self.mode.running(module):
            if module is not None:
                return module(*args, **kwargs)
            return called(kind, target, self.root, args, kwargs)

    def _module(self, path: str) -> nn.Module:
        return self.extended.plain.get(path) or self.root.get_submodule(path)


def _known(first: Any, second: Any) -> bool:
    """Whether a value is plain, and the same at both batch sizes.

    Types and devices are not plain: an experiment's precision and device are not the trace's.
    """
    if isinstance(first, tuple | list):
        return len(first) == len(second) and all(map(_known, first, second))
    return isinstance(first, KNOWN) and type(first) is type(second) and bool(first == second)
