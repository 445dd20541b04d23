"""Detours of the batch: operations between which it lies elsewhere than in dimension 0.

Attention written out often permutes [B, tokens, 3, heads, features] to [3, B, heads, tokens,
features], and takes query, key and value out. Ranks hold rows, and rows are dimension 0 of a value
that a plan can place. So the operations from where the batch leaves dimension 0 to where it is back
are one operation of the graph, which is tried as any other (`independence.py`).

Shapes alone do not say when it is back: [tokens, B, features] may be reshaped to [tokens x B,
features], rows that are no sample's own. So the operations after such a one are tried on random
values: where the result changes with one sample, there the sample lies.

A region is closed under what lies between its operations: nothing outside reads from it and is
read by it.
"""

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch.fx
from torch import Tensor, nn
from torch.fx import Node
from torch.fx.node import map_aggregate, map_arg
from torch.utils import _pytree as pytree

from workbench.model.errors import OperationError
from workbench.model.tracing.batch import BATCHES, REMEDY, called, has_tensors, name_of, tensors
from workbench.model.tracing.rewrites.inplace import changes_in_place, operation_of
from workbench.model.tracing.state import assigned


@dataclass(frozen=True)
class Read:
    """A value that a step of a detour reads.

    Attributes:
        place: its number: first the inputs of the detour are counted, then the steps.
    """

    place: int


Step = tuple[str, Any, Any]
"""One operation: the kind and target of its node, and (args, kwargs) with a `Read` for each value.
"""


class Detour(nn.Module):
    """Operations on activations whose batch lies elsewhere in between.

    Args:
        steps: the operations in order; modules are named by their paths in this one.
        given: the values that the detour gives, each a tensor.
    """

    def __init__(self, steps: Sequence[Step], given: Sequence[Read]) -> None:
        super().__init__()
        self.steps, self.given = tuple(steps), tuple(given)

    def forward(self, *inputs: Any) -> Any:
        """Gives the one value, or a tuple of several."""
        values = list(inputs)

        def read(leaf: Any) -> Any:
            return values[leaf.place] if isinstance(leaf, Read) else leaf

        for kind, target, arguments in self.steps:
            values.append(called(kind, target, self, *map_aggregate(arguments, read)))
        found = tuple(values[each.place] for each in self.given)
        return found if len(found) > 1 else found[0]

    @property
    def names(self) -> list[str]:
        """The bare names of its operations, in order."""
        return [str(getattr(target, "__name__", target)) for _, target, _ in self.steps]

    def extra_repr(self) -> str:
        return ", ".join(self.names)


Recorder = Callable[[Node], None]
"""Runs a new node at both batch sizes, and sets its `meta`."""


def gather_detours(graph: torch.fx.Graph, roots: Sequence[nn.Module], record: Recorder) -> None:
    """Makes one operation of each region in which the batch is elsewhere than in dimension 0.

    Args:
        graph: the traced graph of a `ValueTracer`, with its values.
        roots: the module that was traced, and its copies; each gets the new modules.
        record: sets the `meta` of a new node.

    Raises:
        OperationError: in a region is something that cannot be a part of one operation.
    """
    if not any(node.meta.get("elsewhere") for node in graph.nodes):
        return
    _find_those_not_back(graph, roots[0])
    away = [node for node in graph.nodes if node.meta.get("elsewhere")]
    _take_numbers_from_the_input(graph, away, record)
    for region in _regions(graph, away):
        _Gathering(graph, roots, record, region).gather()
    graph.lint()


def _find_those_not_back(graph: torch.fx.Graph, root: nn.Module) -> None:
    """Marks results that have rows by their shape, and whose rows are of several samples."""
    lying: dict[Node, list[Tensor]] = {}
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        for node in graph.nodes:
            away = bool(node.meta.get("elsewhere"))
            after = any(source in lying for source in node.all_input_nodes)
            if not (away or after) or node.op == "output" or not _has_tensors(node):
                continue
            masks = _lies(node, root, lying)
            if masks and masks[0].sum() * BATCHES[1] > masks[0].numel():
                raise OperationError(
                    node,
                    f"{name_of(node)} mixes samples: as one of three was changed, more than a "
                    f"third of its result changed. {REMEDY}",
                )
            if masks and not away and not _is_first(masks[0]):
                node.meta["elsewhere"] = (
                    f"the rows of {name_of(node)}'s result are not those of one sample after the "
                    f"other. {REMEDY}"
                )
                away = True
            if masks and away:
                lying[node] = masks


def _lies(node: Node, root: nn.Module, lying: Mapping[Node, list[Tensor]]) -> list[Tensor]:
    """Where the second of three samples lies in each tensor of a value; empty if it is unknown."""
    if node.op == "call_module" and has_tensors(root.get_submodule(str(node.target))):
        return []
    found: list[Tensor] = []
    for seed in range(2):  # not every number moves a maximum
        made = {source: _made_up(source, lying, seed) for source in node.all_input_nodes}
        try:
            one, other = (_result(node, root, made, index, seed) for index in range(2))
        except Exception:  # whatever an operation raises for made-up values
            return []
        moved = [a != b for a, b in zip(one, other, strict=True)]
        found = [a | b for a, b in zip(found, moved, strict=True)] if found else moved
    return found


def _result(
    node: Node, root: nn.Module, made: Mapping[Node, tuple[Any, Any]], index: int, seed: int
) -> list[Tensor]:
    torch.manual_seed(seed)
    arguments = map_arg((node.args, node.kwargs), lambda source: made[source][index])
    return tensors(called(node.op, node.target, root, *arguments))


def _made_up(source: Node, lying: Mapping[Node, list[Tensor]], seed: int) -> tuple[Any, Any]:
    """Random values for three samples, and the same with others for the second."""
    value = source.meta["values"][1]
    leaves, structure = pytree.tree_flatten(value)
    if not tensors(value):
        return value, value
    masks = iter(lying.get(source, ()))
    generator = torch.Generator().manual_seed(seed)
    one, other = [], []
    for leaf in leaves:
        if not isinstance(leaf, Tensor):
            one.append(leaf)
            other.append(leaf)
            continue
        if leaf.is_floating_point():
            first, second = (
                torch.rand(leaf.shape, generator=generator).add_(0.5).to(leaf.dtype)
                for _ in range(2)
            )
        else:
            first, second = (torch.full(leaf.shape, value, dtype=leaf.dtype) for value in (0, 1))
        mask = next(masks, None)
        if mask is None:
            mask = torch.zeros(leaf.shape, dtype=torch.bool)
            if source.meta["depends"] and mask.ndim:
                rows = len(mask) // BATCHES[1]
                mask[rows : 2 * rows] = True
        one.append(first)
        other.append(torch.where(mask, second, first).contiguous())
    return pytree.tree_unflatten(one, structure), pytree.tree_unflatten(other, structure)


def _is_first(mask: Tensor) -> bool:
    """Whether what moved belongs to the second third of the rows."""
    before, _, behind = mask.reshape(BATCHES[1], -1)
    return not (before.any() or behind.any())


def _take_numbers_from_the_input(
    graph: torch.fx.Graph, away: Sequence[Node], record: Recorder
) -> None:
    """Reads the batch size, where it is read off a value in a region, off the model's input."""
    few, many = BATCHES
    source = next(node for node in graph.nodes if node.op == "placeholder")
    for node in list(graph.nodes):
        values = node.meta.get("values", (None, None))
        if not all(type(value) is int for value in values) or values[0] * many != values[1] * few:
            continue
        read = {*node.all_input_nodes}
        read |= {up for one in read if not _has_tensors(one) for up in one.all_input_nodes}
        if read.isdisjoint(away):
            continue
        with graph.inserting_before(node):
            number = graph.call_method("size", (source, 0))
            record(number)
            if values[0] != few:
                number = graph.call_function(operator.mul, (number, values[0] // few))
                record(number)
        node.replace_all_uses_with(number)
        graph.erase_node(node)


def _regions(graph: torch.fx.Graph, away: Sequence[Node]) -> list[set[Node]]:
    """The regions, each closed, in order."""
    below = _Below(graph)
    regions: list[set[Node]] = []
    for node in away:
        region = {node}
        for touching in [known for known in regions if known & below.around(node)]:
            region |= touching
            regions.remove(touching)
        regions.append(region)
    closed: list[set[Node]] = []
    for region in regions:
        found = below.closed(region)
        for touching in [known for known in closed if known & found]:
            found = below.closed(found | touching)
            closed.remove(touching)
        closed.append(found)
    return closed


class _Below:
    """What is computed from what."""

    def __init__(self, graph: torch.fx.Graph) -> None:
        self.order = {node: place for place, node in enumerate(graph.nodes)}

    def around(self, node: Node) -> set[Node]:
        """The node and those that have the batch elsewhere next to it."""
        return {node, *(near for near in node.all_input_nodes if near.meta["elsewhere"])}

    def closed(self, region: set[Node]) -> set[Node]:
        """The region with what brings the batch back, and with what lies between.

        Raises:
            OperationError: the model returns a value whose batch is elsewhere.
        """
        found = set(region)
        while True:
            size = len(found)
            for node in list(found):
                found.update(self._next(node))
            if any(node.op == "output" for node in found):
                first = min(region, key=self.order.__getitem__)
                raise OperationError(first, first.meta["elsewhere"])
            found.update(self._between(found))
            if len(found) == size:
                return found

    def _next(self, node: Node) -> Iterator[Node]:
        """What reads a value that cannot leave the region, and what a part of it is taken from."""
        if node.op == "output":
            return
        leaves = not node.meta["elsewhere"] and isinstance(node.meta["values"][0], Tensor)
        yield from () if leaves else node.users
        for source in node.all_input_nodes if node.meta["elsewhere"] else ():
            if isinstance(source.meta["values"][0], tuple | list):
                yield source

    def _between(self, region: set[Node]) -> set[Node]:
        """The nodes outside that read from the region and are read by it."""
        places = [self.order[node] for node in region]
        first, last = min(places), max(places)
        inside = [node for node, place in self.order.items() if first <= place <= last]
        after: set[Node] = set(region)
        for node in inside:
            if not after.isdisjoint(node.all_input_nodes):
                after.add(node)
        before: set[Node] = set(region)
        for node in reversed(inside):
            if not before.isdisjoint(node.users):
                before.add(node)
        return (after & before) - region


class _Gathering:
    """Makes one operation of one region."""

    def __init__(
        self,
        graph: torch.fx.Graph,
        roots: Sequence[nn.Module],
        record: Recorder,
        region: set[Node],
    ) -> None:
        self.graph, self.roots, self.record = graph, roots, record
        self.steps = [node for node in graph.nodes if node in region]
        self.first = next(node for node in self.steps if node.meta["elsewhere"])
        self.inputs = list(
            dict.fromkeys(
                source
                for node in self.steps
                for source in node.all_input_nodes
                if source not in region
            )
        )
        self.given = [n for n in self.steps if any(user not in region for user in n.users)]

    def gather(self) -> None:
        """Puts a call of a `Detour` in the place of the region."""
        self._check()
        if not self.given:  # nothing reads it
            for node in reversed(self.steps):
                self.graph.erase_node(node)
            return
        path = self._path()
        for root in self.roots:
            owner, _, name = path.rpartition(".")
            root.get_submodule(owner).add_module(name, self._module(root))
        with self.graph.inserting_before(self._moved()):
            detour = self.graph.call_module(path, tuple(self.inputs))
            detour.meta.update(self.first.meta)
            self.record(detour)
            values = [detour]
            if len(self.given) > 1:
                values = [
                    self.graph.call_function(operator.getitem, (detour, place))
                    for place in range(len(self.given))
                ]
        for old, new in zip(self.given, values, strict=True):
            if new is not detour:
                new.meta.update(old.meta)
            new.meta["in_place"] = False
            old.replace_all_uses_with(new, delete_user_cb=lambda user: user not in self.steps)
        for node in reversed(self.steps):
            self.graph.erase_node(node)

    def _check(self) -> None:
        for node in self.steps:
            if node.op == "get_attr":
                continue
            if node.op == "call_module":
                module = self.roots[0].get_submodule(str(node.target))
                if has_tensors(module):
                    raise OperationError(
                        node,
                        f"{type(module).__name__} has weights, and gets the batch elsewhere than "
                        f"in dimension 0 ({self.first.meta['elsewhere']})",
                    )
            if _changes(node, self.roots[0]):
                raise OperationError(
                    node,
                    f"{name_of(node)} works in place while the batch is elsewhere than in "
                    "dimension 0: make a new tensor instead",
                )

    def _path(self) -> str:
        """The name of the detour in the module at work, after its first operation."""
        scope = self.first.meta["module"]
        owner = self.roots[0].get_submodule(scope)
        name = name_of(self.first).strip("_")
        while hasattr(owner, name):
            name += "_"
        return f"{scope}.{name}" if scope else name

    def _module(self, root: nn.Module) -> Detour:
        places = {node: Read(place) for place, node in enumerate((*self.inputs, *self.steps))}
        steps: list[Step] = []
        modules: dict[str, str] = {}
        for node in self.steps:
            target: Any = node.target
            if node.op == "call_module":
                path = str(node.target)
                target = modules.setdefault(path, path.replace(".", "_"))
            arguments = map_arg((node.args, node.kwargs), lambda source: cast(Any, places[source]))
            steps.append((node.op, target, arguments))
        made = Detour(steps, [places[node] for node in self.given])
        for path, name in modules.items():
            made.add_module(name, root.get_submodule(path))
        return made.train(root.training)

    def _moved(self) -> Node:
        """Where the detour goes: before its first reader, all that it reads before it.

        Raises:
            OperationError: something is changed in place on the way.
        """
        inside = {*self.steps}
        readers = {user for node in self.given for user in node.users if user not in inside}
        order = list(self.graph.nodes)
        here = next(place for place, node in enumerate(order) if node in readers)
        late: dict[Node, None] = {}

        def take(node: Node) -> None:
            if node in late or order.index(node) < here:
                return
            for source in node.all_input_nodes:
                take(source)
            late[node] = None

        for source in self.inputs:
            take(source)
        begin = order.index(self.steps[0])
        end = max([here, *(order.index(node) for node in (*late, *self.steps))])
        for node in order[begin : end + 1]:
            if node not in inside and _changes(node, self.roots[0]):
                raise OperationError(
                    node,
                    f"{name_of(node)} changes a tensor in place, between operations for which the "
                    "batch is elsewhere than in dimension 0: make a new tensor instead",
                )
        for node in late:
            order[here].prepend(node)
        return order[here]


def _changes(node: Node, root: nn.Module) -> bool:
    """Whether an operation writes into what it reads; assignments are recorded as new values."""
    if getattr(operation_of(node), "__module__", None) == assigned.__name__:
        return False
    return bool(node.all_input_nodes) and changes_in_place(node, root)


def _has_tensors(node: Node) -> bool:
    return bool(tensors(node.meta["values"][0]))
