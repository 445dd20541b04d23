"""Measures what a rank does in a step: each layer, each collective, the update.

Everything that measures is installed when a step begins, and gone when it is over:

    forward     every part of the model runs node by node (`Replay`)
    backward    a hook before each layer's part of it; from one to the next is the layer's time.
                Autograd takes nodes in the reverse order of their making, so that a layer's come
                one after another; those that add to a weight's gradient, and the hooks that send
                it, come at once behind the layer that made it
    collectives the recorder tells of them
    update      hooks of the optimizer

Nothing is computed, kept or freed otherwise than without: hooks behind a node of autograd would
do that, as they keep its gradients alive.

A part that runs node by node does the same operations in the same order as its generated code, and
drops every value after its last reader: results and memory are the same. It takes some
microseconds more for each node.
"""

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from threading import get_ident
from typing import Any, Protocol, Self, get_args

import torch
import torch.fx
from torch import Tensor
from torch._C._autograd import _get_sequence_nr
from torch.fx.node import map_arg
from torch.utils.hooks import RemovableHandle

from workbench.comm.messages.recorder import Doing, RecordedCall, Recorder
from workbench.layers.cut_model import CutModel
from workbench.layers.local.convert import ConvertLayout
from workbench.plan.experiment.metrics import What
from workbench.train.trace.trace import (
    Called,
    Computed,
    Interval,
    RankTrace,
    Sample,
    ranks_by_step,
    trace_path,
    write,
)

Runner = Callable[[torch.fx.GraphModule, torch.fx.Node, Callable[[], Any]], Any]


class Replay:
    """What takes the place of a graph module's `forward`.

    `torch.fx.Interpreter` would add 7 to 19 microseconds to every node, where this adds at most one
    (302 nodes of small layers on one thread take 2.1 to 2.9 times as long with it as with this),
    and keeps values that nobody reads.

    Args:
        run: what is given the part, a node that calls something and what does so; gives what it
            gave.
    """

    def __init__(self, part: torch.fx.GraphModule, run: Runner) -> None:
        self.part, self.run = part, run
        self.modules = {
            node: part.get_submodule(str(node.target))
            for node in part.graph.nodes
            if node.op == "call_module"
        }
        self.last_read: dict[torch.fx.Node, list[torch.fx.Node]] = {}
        seen: set[torch.fx.Node] = set()
        for node in reversed(part.graph.nodes):
            own = dict.fromkeys(n for n in node.all_input_nodes if n not in seen)
            self.last_read[node] = list(own)
            if node not in seen and not node.users:
                self.last_read[node].append(node)  # nobody reads it
            seen.update(own)

    def __call__(self, *inputs: Any) -> Any:
        values: dict[torch.fx.Node, Any] = {}
        given = iter(inputs)
        for node in self.part.graph.nodes:
            if node.op == "output":
                return map_arg(node.args[0], values.__getitem__)
            if node.op == "placeholder":
                values[node] = next(given)
            elif node.op == "get_attr":
                values[node] = _attribute(self.part, str(node.target))
            else:
                values[node] = self._call(node, values)
            for read in self.last_read[node]:
                del values[read]
        raise AssertionError("a graph has an output")

    def _call(self, node: torch.fx.Node, values: dict[torch.fx.Node, Any]) -> Any:
        args: Any = map_arg(node.args, values.__getitem__)
        kwargs: Any = map_arg(node.kwargs, values.__getitem__)
        target: Any = node.target
        if node.op == "call_module":
            target = self.modules[node]
        elif node.op == "call_method":
            args, target = args[1:], getattr(args[0], target)
        return self.run(self.part, node, partial(target, *args, **kwargs))


def _attribute(root: torch.fx.GraphModule, path: str) -> Any:
    value: Any = root
    for name in path.split("."):
        value = getattr(value, name)
    return value


class Clock(Protocol):
    """Takes moments now, and says later when they were."""

    def now(self) -> Any: ...

    def seconds(self, earlier: Any, later: Any) -> float:
        """From one moment to another; waits until both are over."""
        ...


class HostClock:
    def now(self) -> float:
        return time.perf_counter()

    def seconds(self, earlier: float, later: float) -> float:
        return later - earlier


class StreamClock:
    """Of a rank that computes on a GPU, whose work ends long after the host has asked for it.

    A moment is an event in the stream that is current when it is taken. Nothing is waited for
    until somebody asks for seconds, so that what overlaps still does. A stream that waits for a
    collective does so between two events: that is how long the computation was blocked.
    """

    def now(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, earlier: torch.cuda.Event, later: torch.cuda.Event) -> float:
        earlier.synchronize()
        later.synchronize()
        return float(earlier.elapsed_time(later)) / 1e3


def clock_of(device: torch.device) -> Clock:
    return StreamClock() if device.type == "cuda" else HostClock()


Moment = Any
"""What the clock gives."""

Work = tuple[What, str, str]
"""What is computed, its label, and the conversion if it is one."""


@dataclass
class _Seen:
    began: Moment
    ended: Moment
    bytes: int = 0
    intervals: dict[Doing, list[tuple[Moment, Moment]]] = field(
        default_factory=lambda: {"blocked": [], "helping": []}
    )


class Tracer:
    """Measures passes of a model on this rank, between its beginning and its end.

        with Tracer(model, passes.parts, recorder, device) as tracer:
            stepper.run(...)
        tracer.trace.layer_seconds()

    Args:
        parts: the parts of the model, which passes execute one after another; behind the last is
            the loss.
    """

    trace: RankTrace

    def __init__(
        self,
        model: CutModel,
        parts: Sequence[torch.fx.GraphModule],
        recorder: Recorder,
        device: torch.device,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> None:
        self._recorder, self._optimizer, self._clock = recorder, optimizer, clock_of(device)
        self._parts = tuple(parts)
        self._layers = {layer.node: layer.name for layer in model.plan.graph.layers}
        self._stretches: list[tuple[Work, Moment, Moment]] = []
        self._open: tuple[Work, Moment] | None = None
        self._calls: dict[RecordedCall, _Seen] = {}
        self._entered: dict[tuple[RecordedCall, Doing], Moment] = {}
        self._threads: set[int] = set()  # that compute
        self._in_backward = self._collects = False
        self._handles: list[RemovableHandle] = []
        self._origin: Moment = None

    def __enter__(self) -> Self:
        for module in self._modules():
            replay: Callable[..., Any] = Replay(module, self._run)
            own = self._last(replay) if module is self._parts[-1] else replay
            module.__dict__["forward"] = own  # goes before that of its class
        if self._optimizer is not None:
            self._handles = [
                self._optimizer.register_step_pre_hook(lambda *_: self._turn("update")),
                self._optimizer.register_step_post_hook(lambda *_: self._turn()),
            ]
        self._threads.add(get_ident())
        self._recorder.listener = self
        self._collects = gc.isenabled()
        gc.disable()  # or the layer that is at work would seem to take what collecting takes
        self._origin = self._clock.now()
        self._turn("load")
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._turn()
        end = self._clock.now()
        if self._collects:
            gc.enable()
        self._recorder.listener = None
        for handle in self._handles:
            handle.remove()
        for module in self._modules():
            del module.__dict__["forward"]
        if kind is None:
            self.trace = self._resolved(end)

    def begun(self, call: RecordedCall) -> None:
        self._calls[call] = _Seen(began := self._clock.now(), began)

    def received(self, call: RecordedCall, num_bytes: int) -> None:
        self._seen(call).bytes += num_bytes

    def entered(self, call: RecordedCall, doing: Doing) -> None:
        self._entered[call, doing] = self._clock.now()

    def left(self, call: RecordedCall, doing: Doing) -> None:
        seen, now = self._seen(call), self._clock.now()
        began, seen.ended = self._entered.pop((call, doing)), now
        if get_ident() in self._threads:  # others work for a collective beside the computation
            seen.intervals[doing].append((began, now))

    def _seen(self, call: RecordedCall) -> _Seen:
        """What is known of a collective; it may have begun before the step."""
        if call not in self._calls:
            self._calls[call] = _Seen(self._origin, self._origin)
        return self._calls[call]

    def _modules(self) -> Iterator[torch.fx.GraphModule]:
        """The parts, and the segments in them that are computed again in backward."""
        for part in self._parts:
            yield from (m for m in part.modules() if isinstance(m, torch.fx.GraphModule))

    def _last(self, replay: Callable[..., Any]) -> Callable[..., Any]:
        """The last part, behind which the loss is computed."""

        def run(*inputs: Any) -> Any:
            outputs = replay(*inputs)
            self._turn("loss")
            return outputs

        return run

    def _run(self, part: torch.fx.GraphModule, node: torch.fx.Node, call: Callable[[], Any]) -> Any:
        """Does what a node of a part says."""
        label, conversion = self._label(part, node)
        made = _get_sequence_nr()
        if label:
            self._turn("forward", label, conversion)
        outputs = call()
        if label:
            self._turn()
        if torch.is_grad_enabled() and not self._in_backward:
            self._await(label, conversion, outputs, made)
        return outputs

    def _label(self, part: torch.fx.GraphModule, node: torch.fx.Node) -> tuple[str, str]:
        """The layer, or a conversion's reader and its name.

        Both are empty for what holds others, and for what takes its outputs apart.
        """
        if node.name in self._layers:
            return self._layers[node.name], ""
        module = part.get_submodule(str(node.target)) if node.op == "call_module" else None
        if isinstance(module, ConvertLayout):
            return module.layer, module.conversion.name
        return "", ""

    def _await(self, label: str, conversion: str, outputs: Any, made: int) -> None:
        """Sees to it that the backward pass of what gave `outputs` is noticed when it begins."""

        def begin(_gradients: tuple[Tensor | None, ...]) -> None:
            if not self._in_backward:
                self._in_backward = True
                self._threads.add(get_ident())  # of a GPU autograd has a thread
                engine: Any = torch.autograd.Variable._execution_engine
                engine.queue_callback(self._end_backward)
            self._turn("backward" if label else None, label, conversion)

        for output in _tensors(outputs):
            node = output.grad_fn
            if node is not None and node._sequence_nr() >= made:
                node.register_prehook(begin)

    def _end_backward(self) -> None:
        self._in_backward = False
        self._turn()

    def _turn(self, what: What | None = None, label: str = "", conversion: str = "") -> None:
        """From now on this is computed, or nothing that is known."""
        work = None if what is None else (what, label, conversion)
        if self._open is not None and self._open[0] == work:
            return  # a further output of the same layer
        now = self._clock.now()
        if self._open is not None:
            self._stretches.append((*self._open, now))
        self._open = None if work is None else (work, now)

    def _resolved(self, end: Moment) -> RankTrace:
        stretches = [
            Computed(what, label, self._during((begin, until)), conversion)
            for (what, label, conversion), begin, until in self._stretches
        ]
        return RankTrace(
            self._clock.seconds(self._origin, end),
            tuple(stretches),
            tuple(self._called(call, seen) for call, seen in list(self._calls.items())),
        )

    def _called(self, call: RecordedCall, seen: _Seen) -> Called:
        group, op, layer, phase = call.key
        blocked, helped = (
            tuple(map(self._during, seen.intervals[doing])) for doing in get_args(Doing)
        )
        during = self._during((seen.began, seen.ended))
        beside = bool(helped) or seen.began is self._origin  # or it began in an earlier step
        return Called(
            group, call.number, op, layer, phase, seen.bytes, during, beside, blocked, helped
        )

    def _during(self, moments: tuple[Moment, Moment]) -> Interval:
        begin, end = (self._clock.seconds(self._origin, moment) for moment in moments)
        return begin, end


def _tensors(value: Any) -> Iterator[Tensor]:
    """Those that a layer gave, alone or in tuples, lists and mappings."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for part in value:
            yield from _tensors(part)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))


class Traces:
    """Traces steps of one rank, and writes what they took."""

    def __init__(
        self, directory: Path, rank: int, every: int, tracer: Callable[[], Tracer]
    ) -> None:
        self._directory, self._rank, self._every = directory, rank, every
        self._tracer = tracer
        self._agreed_at: float | None = None
        self._rows: tuple[tuple[int, ...], ...] = ()

    def around(self, step: int) -> AbstractContextManager[object]:
        """What to run a step in; it measures only where the step is to be traced."""
        due = self._every > 0 and (step + 1) % self._every == 0
        return self._traced(step) if due else nullcontext()

    def agreed(self, rows: tuple[tuple[int, ...], ...]) -> None:
        """The status of a step has just been summed over all ranks."""
        self._agreed_at, self._rows = time.perf_counter(), rows

    def restart(self, tracer: Callable[[], Tracer]) -> None:
        """The run goes on under another plan: its earlier traces are removed."""
        self._tracer, self._agreed_at = tracer, None
        for step, ranks in ranks_by_step(self._directory).items():
            if self._rank in ranks:
                trace_path(self._directory, step, self._rank).unlink(missing_ok=True)

    @contextmanager
    def _traced(self, step: int) -> Iterator[None]:
        agreed_at = self._agreed_at
        since_s = 0.0 if agreed_at is None else time.perf_counter() - agreed_at
        with self._tracer() as tracer:
            yield
        write(self._directory, Sample(step, self._rank, self._rows, since_s, tracer.trace))
