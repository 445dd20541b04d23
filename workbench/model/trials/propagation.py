"""Along which dimensions operations may be cut, found by trying: heads go through attention so.

What a cut linear layer gives is cut along its features. An operation behind it keeps the cut where
it computes the same piece by piece: of pieces of what it reads, it gives pieces of its result. That
is tried on real values, on one piece and on all others together. Where an argument counts what is
cut, as the 12 heads of `x.view(batch, tokens, 12, 64)`, it counts the pieces there are.

A cut goes forward from each linear layer as far as operations keep it, and is worth keeping where
it reaches a linear layer that reads cut features: as the heads of query, key and value do through
attention, and the halves of a gated unit. Such layers are then cut into whole units, their heads.

Query, key and value may be one linear layer: its features are three blocks, cut alike.

What has no rows, as a mask or the bias of relative positions, lies whole on every rank: it is read
so, or each rank reads its own pieces. Where that learns, as the weight of a norm of heads, each
rank's gradient is a summand, and so are those of the weights of a module that is cut.

What computes each token of [rows, tokens, features] by itself, as a norm of features, may be cut by
tokens, wherever it stands.
"""

import math
import operator
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cached_property
from itertools import islice
from typing import Any

import torch
import torch.fx
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from workbench.model.build import code_of
from workbench.model.record.batch import BATCHES, called, cleared, has_tensors, tensors
from workbench.model.record.draws import Held, drawing
from workbench.model.trials.probe import Draw, Probe, Samples, Traced, TrialDraws, alike
from workbench.plan.graph.saved import Propagation

# A dimension, counted with the batch, and the equal blocks of it that are cut alike.
Cut = tuple[int, ...]

_SAMPLES: Samples = (1, 2)
_ALONE = (1, 1)  # (first, number) of the piece that is tried by itself


class PieceTrial:
    """One operation, run on pieces of what it reads."""

    def __init__(self, node: Node, traced: Traced) -> None:
        self.node, self.traced = node, traced
        self.probe = Probe(node, Draw("normal", midst=True), traced)
        self.sources = reader_inputs(node)
        self.lead = next(filter(has_rows, self.sources), None)
        self.leaves, self.form = pytree.tree_flatten((node.args, node.kwargs))

    def ways(self, cuts: Sequence[Cut], most: int) -> Iterator[Propagation]:
        """The ways in which the output is cut where the inputs are cut so, into `most` or less."""
        if self.whole is None or any(bool(one.isnan().any()) for one in tensors(self.whole)):
            return  # numbers that the operation does not take: they show nothing
        shape = first_tensor(self.node).shape
        outputs: dict[int, list[Cut]] = {}  # by the most pieces that they can have
        for dim in range(1, len(shape)):
            for blocks in sorted({1, *(cut[1] for cut in cuts if cut)}):
                if shape[dim] % blocks == 0:
                    pieces = math.gcd(most, shape[dim] // blocks)
                    outputs.setdefault(pieces, []).append((dim, blocks))
        for pieces in outputs.keys() - {1}:
            for scaled in self._counting(pieces):
                for drawn in range(1, len(shape)) if self.node.meta["draws"] else (0,):
                    parts = [Held(drawn, *part, pieces) for part in (_ALONE, (0, pieces - 1))]
                    given = [self._of(cuts, part, scaled) for part in parts]
                    for output in outputs[pieces]:
                        wanted = [_piece(self.whole, output, part) for part in parts]
                        if all(map(_equal, given, wanted)) and self._apart(cuts, output, pieces):
                            yield Propagation(tuple(cuts), output, pieces, scaled, drawn)

    @cached_property
    def whole(self) -> Any:
        """The operation's result for all of what it reads; None: it fails on made-up numbers."""
        try:
            return self._run({source: self._value(source) for source in self.sources})
        except Exception:  # whatever it is that an operation raises
            return None

    def _apart(self, cuts: Sequence[Cut], output: Cut, pieces: int) -> bool:
        """Whether a piece of the result stays as it is, bit by bit, where the others are NaN."""
        given = {}
        for source, cut in zip(self.sources, cuts, strict=True):
            value = self._value(source)
            given[source] = _alone(value, cut, pieces) if cut else value
        part = Held(0, *_ALONE, pieces)
        return alike(_piece(self._run(given), output, part), _piece(self.whole, output, part))

    def _of(self, cuts: Sequence[Cut], part: Held, scaled: tuple[int, ...]) -> Any:
        """The operation's result for these pieces; None: it takes none."""
        given = {}
        for source, cut in zip(self.sources, cuts, strict=True):
            value = self._value(source)
            given[source] = _piece(value, cut, part) if cut else value
        try:
            return self._run(given, scaled, part)
        except Exception:  # whatever it is that an operation raises for another shape
            return None

    def _run(
        self, given: Mapping[Node, Any], scaled: tuple[int, ...] = (), part: Held | None = None
    ) -> Any:
        leaves = [
            leaf * part.number // part.pieces if part and place in scaled else leaf
            for place, leaf in enumerate(self.leaves)
        ]
        args, kwargs = pytree.tree_unflatten(leaves, self.form)

        def read(source: Node) -> Any:  # a copy, since some operations write into what they read
            return pytree.tree_map_only(Tensor, torch.clone, given[source])

        dims = self.node.meta["draws"]
        with drawing(TrialDraws(dims, _SAMPLES, 0, part)) if dims else nullcontext():
            read_args, read_kwargs = map_arg((args, kwargs), read)
            module, target = self.probe.module(), self.node.target
            root, kind = module or self.traced.root, "" if module else self.node.op
            value = called(kind, target, root, read_args, read_kwargs)
            return cleared(self.node, read_args, value)

    def _value(self, source: Node) -> Any:
        return self.probe.value(source, _SAMPLES)

    def _counting(self, pieces: int) -> Iterator[tuple[int, ...]]:
        """The places of arguments that might count what is cut: none, one, or several equal."""
        yield ()
        numbers: dict[int, list[int]] = {}
        for place, leaf in enumerate(self.leaves):
            if isinstance(leaf, int) and not isinstance(leaf, bool) and leaf > 0:
                if leaf % pieces == 0:
                    numbers.setdefault(leaf, []).append(place)
        for places in numbers.values():
            yield from ((place,) for place in places)
            if len(places) > 1:
                yield tuple(places)


def reader_inputs(node: Node) -> list[Node]:
    """What a node reads, in the order of its arguments: `plan.graph.Layer.inputs` has the same."""
    found: list[Node] = []
    map_arg((node.args, node.kwargs), found.append)
    return found


def has_rows(source: Node) -> bool:
    """Whether it is a tensor, or several, with the rows of the batch."""
    return bool(tensors(source.meta["values"][0])) and source.meta["rows"] == 1


def first_tensor(node: Node) -> Tensor:
    """The value of a node, or the first of several tensors."""
    return tensors(node.meta["values"][0])[0]


def _piece(value: Any, cut: Cut, part: Held) -> Any:
    """These pieces of every tensor in a value; None: it has no such dimension."""
    dim, blocks = cut
    if any(t.ndim <= dim or t.shape[dim] % (blocks * part.pieces) for t in tensors(value)):
        return None

    def taken(whole: Tensor) -> Tensor:
        each = whole.shape[dim] // (blocks * part.pieces)
        split = whole.unflatten(dim, (blocks, part.pieces, each))
        split = split.narrow(dim + 1, part.first, part.number)
        return split.flatten(dim, dim + 2).contiguous()

    return pytree.tree_map_only(Tensor, taken, value)


def _alone(value: Any, cut: Cut, pieces: int) -> Any:
    """A value of which this piece stays, and all others are NaN."""
    dim, blocks = cut

    def poisoned(whole: Tensor) -> Tensor:
        if not whole.is_floating_point():
            return whole
        each = whole.shape[dim] // (blocks * pieces)
        split = whole.unflatten(dim, (blocks, pieces, each))
        kept = torch.full_like(split, math.nan)
        kept.narrow(dim + 1, *_ALONE).copy_(split.narrow(dim + 1, *_ALONE))
        return kept.flatten(dim, dim + 2)

    return pytree.tree_map_only(Tensor, poisoned, value)


def _equal(first: Any, second: Any) -> bool:
    """Whether both are there, and equal up to rounding."""
    if first is None or second is None or len(tensors(first)) != len(tensors(second)):
        return False
    return alike(first, second, rounded=True)


_BLOCKS = (1, 2, 3)
_BY_TOKENS: Cut = (1, 1)
_KEPT = ("elementwise", "dropout")  # the kinds that keep a cut
_MET = ("add", "mul")  # those that keep a cut that both inputs have, which are of one shape
_TRIED = (*_MET, "pool", "layer_norm", "op")  # those of which trying shows what they keep


def find_propagations(graph: torch.fx.Graph, traced: Traced) -> None:
    """Finds how operations may be cut.

    Sets `meta["propagations"]` of every node, and of linear layers `meta["units"]`: the
    `output_units`, `output_blocks` and `input_units` of `plan.graph.Layer`.
    """
    for node in graph.nodes:
        node.meta["propagations"], node.meta["units"] = (), (0, 1, 0)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        _Search(graph, traced).run()


class _Search:
    def __init__(self, graph: torch.fx.Graph, traced: Traced) -> None:
        self.graph, self.traced = graph, traced
        # The cuts that each value may have, with the number of equal pieces.
        self.coming: dict[Node, dict[Cut, int]] = {}
        self.found: dict[Node, tuple[Propagation, ...]] = {}
        self._tried: dict[str, tuple[Propagation, ...]] = {}
        users = Counter(map(self._weight, filter(self._is_linear, graph.nodes)))
        tables = [self._weight(n) for n in graph.nodes if traced.kinds.get(n) == "embedding"]
        self._shared = {weight for weight, count in users.items() if count > 1} | set(tables)
        self._users = Counter(key for node in graph.nodes for key in self._held(node))

    def run(self) -> None:
        for node in self.graph.nodes:
            if node.op != "output":
                self.coming[node] = self._forward(node)
        self._count_inputs()
        wanted: dict[Node, dict[Cut, int]] = {}
        for node in reversed(self.graph.nodes):
            if node.op == "output":
                continue
            users = (user for user in node.users if not _is_type(user))
            readers = [self._read(reader, node, wanted.get(reader, {})) for reader in users]
            wanted[node] = _in_common(readers) if readers else {}
            if node in self.found:
                kept = [p for p in self.found[node] if p.output in wanted[node]]
                node.meta["propagations"] = tuple(kept)
            elif self._is_linear(node) and self._weight(node) not in self._shared:
                node.meta["units"] = self._units(node, wanted[node])
        for node in self.graph.nodes:
            node.meta["propagations"] += self._by_tokens(node)

    def _forward(self, node: Node) -> dict[Cut, int]:
        """The cuts that a node's value may have, from those of what it reads."""
        kind = self.traced.kinds.get(node, "")
        if self._is_linear(node):
            value = node.meta["values"][0]
            return {
                (value.ndim - 1, blocks): value.shape[-1] // blocks
                for blocks in _BLOCKS
                if value.shape[-1] % blocks == 0 < value.ndim - 1
            }
        read = [self.coming[source] for source in node.all_input_nodes if has_rows(source)]
        if not any(read) or node.meta["rows"] != 1:
            return {}
        if kind in _KEPT:
            return _kept(kind, read[0])
        if kind in _MET and _of_one_shape(node):
            return _in_common(read)
        if kind not in _TRIED or not self._holds_plain_weights(node):
            return {}
        self.found[node] = self._propagations(node)
        return {p.output: p.pieces for p in self.found[node]}

    def _count_inputs(self) -> None:
        """Lets those that count the rows of what may be cut count those of the model's input.

        What is cut has the rows of a whole group, and counting them is no reason not to cut it.
        """
        first, *others = [node for node in self.graph.nodes if node.op == "placeholder"]
        rows: Node | None = None
        for node in list(self.graph.nodes):
            if node.op == "output" or not _is_size(node) or node.meta["values"] != BATCHES:
                continue
            above = node
            while _is_size(above):
                above = above.all_input_nodes[0]
            if not (self.coming[above] or _tokens(above)):
                continue
            if rows is None:
                with self.graph.inserting_after(others[-1] if others else first):
                    rows = self.graph.call_method("size", (first, 0))
                rows.meta, self.coming[rows] = dict(node.meta), {}
                self.traced.kinds[rows], self.traced.varies[rows] = "size", False
            node.replace_all_uses_with(rows)
        for node in reversed(list(self.graph.nodes)):
            if node.op not in ("placeholder", "output") and _is_size(node) and not node.users:
                self.graph.erase_node(node)

    def _read(self, reader: Node, source: Node, wanted: Mapping[Cut, int]) -> dict[Cut, int]:
        """The cuts of a value that are worth keeping for one of its readers."""
        if self._is_linear(reader):
            dim = source.meta["values"][0].ndim - 1
            return {(dim, 1): self.coming[source].get((dim, 1), 0)}
        if reader in self.found:
            at = reader_inputs(reader)
            return {
                p.inputs[index]: math.gcd(p.pieces, wanted[p.output])
                for p in self.found[reader]
                if p.output in wanted
                for index, read in enumerate(at)
                if read is source and p.inputs[index] in self.coming[source]
            }
        kind = self.traced.kinds.get(reader, "")
        if kind in _KEPT:
            return _kept(kind, wanted)
        return dict(wanted) if kind in _MET and _of_one_shape(reader) else {}

    def _units(self, node: Node, wanted: Mapping[Cut, int]) -> tuple[int, int, int]:
        """(output_units, output_blocks, input_units) of a linear layer; 0: any."""
        value, (source, *_) = node.meta["values"][0], node.all_input_nodes
        before = source.meta["values"][0]
        came = self.coming[source].get((before.ndim - 1, 1), 0)
        units_in = came if came < before.shape[-1] else 0
        for (_dim, blocks), pieces in sorted(wanted.items()):
            if pieces > 1:
                each = value.shape[-1] // blocks
                return (0 if blocks == 1 and pieces == each else pieces), blocks, units_in
        return 0, 1, units_in

    def _by_tokens(self, node: Node) -> tuple[Propagation, ...]:
        """The way in which an operation may be cut by tokens, where its kind does not say so."""
        of_kind = ("linear", "embedding", *_KEPT, *_MET)
        tokens = _tokens(node)
        if not tokens or self.traced.kinds.get(node) in of_kind or node.meta["draws"]:
            return ()
        if not self._holds_plain_weights(node):
            return ()
        cuts: list[Cut] = []
        sliced: list[tuple[int, int]] = []
        for place, source in enumerate(reader_inputs(node)):
            counts = _counts(source) and source.meta["values"] != BATCHES
            if counts or (has_rows(source) and _tokens(source) != tokens):
                return ()
            dim = 0 if _is_size(source) else first_tensor(source).ndim - 2
            if has_rows(source):
                cuts.append(_BY_TOKENS)
            elif dim >= 0 and not _is_size(source) and first_tensor(source).shape[dim] == tokens:
                cuts.append((dim, 1))
                sliced.append((place, dim))
            else:
                cuts.append(())
        if _BY_TOKENS not in cuts:
            return ()
        key = f"tokens of {self._call(node)}"
        if key not in self._tried:
            tried = PieceTrial(node, self.traced).ways(cuts, tokens)
            ways = (way for way in tried if way.output == _BY_TOKENS and way.pieces > 1)
            whole = [place for place, _ in sliced]
            inputs = tuple(() if place in whole else cut for place, cut in enumerate(cuts))
            self._tried[key] = tuple(
                replace(way, inputs=inputs, of_tokens=True, sliced=tuple(sliced))
                for way in islice(ways, 1)
            )
        return self._tried[key]

    def _holds_plain_weights(self, node: Node) -> bool:
        """Whether all that a module holds are parameters of its own: no buffers, no parts'."""
        if node.op != "call_module":
            return True
        module = self.traced.root.get_submodule(str(node.target))
        return not (any(map(has_tensors, module.children())) or [*module.buffers()])

    def _weight(self, node: Node) -> int:
        """What tells a linear layer's or an embedding's weight from others."""
        return id(self.traced.root.get_submodule(str(node.target)).weight)

    def _is_linear(self, node: Node) -> bool:
        return self.traced.kinds.get(node) == "linear"

    def _held(self, node: Node) -> list[int]:
        """What tells the parameters that a node uses from others."""
        if node.op == "get_attr":
            return [id(operator.attrgetter(str(node.target))(self.traced.root))]
        if node.op != "call_module":
            return []
        return list(map(id, self.traced.root.get_submodule(str(node.target)).parameters()))

    def _is_owned(self, source: Node) -> bool:
        """Whether each parameter that a value without rows is made of is used in one place."""
        learnt = (one for one in source.all_input_nodes if one.meta.get("learns", False))
        owned = all(self._users[key] == 1 for key in self._held(source))
        return owned and not source.meta["depends"] and all(map(self._is_owned, learnt))

    def _propagations(self, node: Node) -> tuple[Propagation, ...]:
        """The ways in which an operation may be cut, tried once for equal calls."""
        key = self._call(node)
        if key not in self._tried:
            self._tried[key] = tuple(self._shown(node))
        return self._tried[key]

    def _call(self, node: Node) -> str:
        places: dict[Node, int] = {}

        def described(source: Node) -> str:
            place = places.setdefault(source, len(places))
            values = [tuple(t.shape) for t in tensors(source.meta["values"][0])]
            number = source.meta["values"][0] if not values else ""
            cuts, learns = self.coming[source], source.meta.get("learns", False)
            learns = learns and (self._is_owned(source) or "elsewhere, too")
            # Of made-up numbers only the shape matters; of indices and masks, each one. Several
            # tensors, such as halves, are what an operation makes of such.
            own = "" if not values or self.traced.made_up(source) else source.name
            if isinstance(source.meta["values"][0], tuple | list) and source.op != "placeholder":
                own = self._call(source)
            return f"<{place} {values} {number} {source.meta['rows']} {learns} {cuts} {own}>"

        target: Any = node.target
        if node.op == "call_module":
            target = code_of(self.traced.root.get_submodule(str(target))) or target
        return repr((node.op, target, map_arg((node.args, node.kwargs), described)))

    def _shown(self, node: Node) -> Iterator[Propagation]:
        trial = PieceTrial(node, self.traced)
        for cut in self.coming[trial.lead] if trial.lead else ():
            inputs = self._inputs(node, trial.lead, cut)
            pieces = math.gcd(*(self.coming[source][own] for source, own in inputs if own))
            if pieces < 2:
                continue
            cuts = tuple(own for _, own in inputs)
            more = self._as_long(trial.lead, cut, inputs)
            # The gradient of what has rows, and is read whole, would be a summand on each rank.
            needed = {at for at, (source, one) in enumerate(inputs) if not one and _learns(source)}
            if not needed <= more.keys():
                continue
            sliced = {at: dim for at, (dim, _) in more.items() if not has_rows(inputs[at][0])}
            every = tuple(more.get(at, own) for at, own in enumerate(cuts))
            converted = tuple(() if at in sliced else own for at, own in enumerate(every))
            ways = [
                replace(way, inputs=converted, sliced=tuple(sliced.items()))
                for way in (trial.ways(every, pieces) if more else ())
            ]
            yield from ways or (() if needed else trial.ways(cuts, pieces))

    def _inputs(self, node: Node, lead: Node | None, cut: Cut) -> list[tuple[Node, Cut]]:
        """How each input is cut where the first one comes so; (): whole; none if that cannot be.

        Dimensions of equal place from the right belong together, as in broadcasting, or else from
        the left.
        """
        assert lead is not None
        dim, blocks = cut
        found: list[tuple[Node, Cut]] = []
        for source in reader_inputs(node):
            own: Cut = ()
            if _counts(source) and source.meta["values"] != BATCHES:
                return []  # it counts something else than the rows of the batch
            if has_rows(source):
                places = (dim + first_tensor(source).ndim - first_tensor(lead).ndim, dim)
                cuts = ((place, blocks) for place in places)
                own = next((one for one in cuts if one in self.coming[source]), ())
            alone = has_rows(source) or not source.meta.get("learns", False)
            if not (own or alone or self._is_owned(source)):
                return []
            found.append((source, own))
        return found

    def _as_long(
        self, lead: Node | None, cut: Cut, inputs: Sequence[tuple[Node, Cut]]
    ) -> dict[int, Cut]:
        """The cuts of inputs that come whole, by their places, and are as long as what is cut.

        Such an input has the pieces of all ranks, as the bias of relative positions has the heads.
        """
        assert lead is not None
        dim, blocks = cut
        found: dict[int, Cut] = {}
        for place, (source, own) in enumerate(inputs):
            if own or _is_size(source) or (blocks > 1 and not has_rows(source)):
                continue
            at = dim + first_tensor(source).ndim - first_tensor(lead).ndim
            least = 1 if has_rows(source) else 0
            if at >= least and first_tensor(source).shape[at] == first_tensor(lead).shape[dim]:
                found[place] = at, blocks
        return found


def with_pieces(node: Node, scaled: Sequence[int], held: int, of: int) -> None:
    """Lets the arguments of a node that count pieces count those that are held."""
    leaves, form = pytree.tree_flatten((node.args, node.kwargs))
    for place in scaled:
        leaves[place] = leaves[place] * held // of
    node.args, node.kwargs = pytree.tree_unflatten(leaves, form)


def _in_common(every: Sequence[Mapping[Cut, int]]) -> dict[Cut, int]:
    first, *others = every
    return {
        cut: math.gcd(pieces, *(other[cut] for other in others))
        for cut, pieces in first.items()
        if all(cut in other for other in others)
    }


def _kept(kind: str, cuts: Mapping[Cut, int]) -> dict[Cut, int]:
    """The cuts that an operation of this kind keeps: dropout's draws have places, not blocks."""
    return {cut: pieces for cut, pieces in cuts.items() if kind != "dropout" or cut[1] == 1}


def _learns(source: Node) -> bool:
    """Whether it has rows, and a gradient."""
    return has_rows(source) and bool(source.meta.get("learns", False))


def _tokens(node: Node) -> int:
    """The tokens of a value [rows, tokens, features]; 0: it is none."""
    value = node.meta["values"][0] if "values" in node.meta else None
    if not isinstance(value, Tensor) or value.ndim != 3 or node.meta["rows"] != 1:
        return 0
    return value.shape[1]


def _is_size(source: Node) -> bool:
    return not tensors(source.meta["values"][0])


def _is_type(source: Node) -> bool:
    return isinstance(source.meta.get("values", (None,))[0], torch.dtype | torch.device)


def _counts(source: Node) -> bool:
    """Whether it is a number of something: no type, and none such as the least of a type."""
    return _is_size(source) and not (_is_type(source) or source.meta["of_type"])


def _of_one_shape(node: Node) -> bool:
    return len({first_tensor(source).shape for source in node.all_input_nodes}) == 1
