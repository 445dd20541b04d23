"""A plan in torch's own words: what `parallelize_module` and `fully_shard` are told, as data.

    shard_out     ColwiseParallel of a `nn.Linear`
    shard_in      RowwiseParallel of a `nn.Linear`
    replicate     nothing: such layers see the rank's own rows, as in this library
    data parallel a list of the modules that `fully_shard` is called for

Between modules a tensor is one of two: the rank's own rows, `Shard(0)` over the group, or the
group's rows with sharded features, `Shard(-1)`, where a pair of layers and what is element-wise
between them need no more. Both are torch's `input_layouts` and `output_layouts`.

What torch cannot say is refused by name: unequal pieces, other kinds of layers, several group
sizes, rounds. `model/export.py` makes torch's objects of it.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

from workbench.plan.graph.graph import Graph, Layer
from workbench.plan.io.errors import PlanError
from workbench.plan.io.html import Markup, frame_html, frame_of, save
from workbench.plan.placement.flow import Flow
from workbench.plan.placement.layer_plan import LayerPlan
from workbench.plan.placement.placement import Shard
from workbench.plan.plans.toml import PlanFields

if TYPE_CHECKING:
    import pandas

Tensor = Literal["rows", "features"]
"""The rank's own rows, `Shard(0)`; or the group's rows, cut by features, `Shard(-1)`."""


class PlanOfModules(PlanFields, Protocol):
    """What is read of a `Plan`."""

    @property
    def flow(self) -> Flow: ...


@dataclass(frozen=True)
class ModuleStyle:
    """How one module is parallelized.

    Attributes:
        style: "colwise" (outputs are cut) or "rowwise" (inputs are cut).
        reads: what its input is when it arrives.
        gives: what its output is to be.
    """

    style: Literal["colwise", "rowwise"]
    reads: Tensor
    gives: Tensor


@dataclass(frozen=True)
class ModulePlan:
    """A plan, module by module.

    Attributes:
        model: the model's name.
        world_size: the number of ranks.
        group_size: the ranks that share one copy of the split modules; 1: nothing is split.
        styles: the modules that are split, by their path.
        replicated: the parameters that every rank has whole, by name; each rank's gradient is that
            of its own rows, and is to be summed over the world.
        sharded: the parameters of split modules, by name; their gradients are those of the group's
            rows already, and are to be summed over the ranks with the same piece.
        blocks: the modules that `fully_shard` takes one by one, innermost first, where nothing is
            split; the model itself comes last, and has no path here.
    """

    model: str
    world_size: int
    group_size: int
    styles: Mapping[str, ModuleStyle]
    replicated: tuple[str, ...]
    sharded: tuple[str, ...]
    blocks: tuple[str, ...]

    @property
    def mesh_shape(self) -> tuple[int, ...]:
        """The device mesh: (replicas, group size), or (world size,) where nothing is split."""
        if self.group_size == 1:
            return (self.world_size,)
        return self.world_size // self.group_size, self.group_size

    def to_frame(self) -> "pandas.DataFrame":
        """One line for each module that is split, or that `fully_shard` takes: how."""
        rows = [{"module": name, **asdict(how)} for name, how in self.styles.items()]
        whole = {"style": "fully_shard", "reads": "rows", "gives": "rows"}
        rows += [{"module": name, **whole} for name in self.blocks]
        return frame_of(rows, ("module", "style", "reads", "gives"))

    def save(self, path: str | Path) -> None:
        """Writes its table into a file: "x.html" or "x.csv".

        Raises:
            ValueError: the name has another ending.
        """
        save(self, path)

    def __repr__(self) -> str:
        split = f"{len(self.styles)} modules split" if self.styles else "data parallel"
        return f"<ModulePlan of {self._headline}: {split}>"

    def _repr_html_(self) -> Markup:
        return frame_html(self._headline, self.to_frame(), "modules")

    @property
    def _headline(self) -> str:
        return f"{self.model} on a mesh of {'x'.join(map(str, self.mesh_shape))}"

    def __str__(self) -> str:
        lines = [self._headline]
        for name, how in self.styles.items():
            lines.append(f"  {name}: {how.style}, reads {how.reads}, gives {how.gives}")
        if not self.styles:
            blocks = ", ".join(self.blocks[:4]) + (", ..." if len(self.blocks) > 4 else "")
            lines.append(f"  data parallel; blocks {blocks or 'none'}")
        return "\n".join(lines)


def module_plan_of(plan: PlanOfModules) -> ModulePlan:
    """A plan in torch's words."""
    graph = plan.graph
    _check(plan)
    split = {name: one for name, one in plan.layers.items() if one.group_size > 1}
    for name, choice in split.items():
        _check_layer(plan, graph[name], choice)
    sizes = sorted({choice.group_size for choice in split.values()})
    if len(sizes) > 1:
        named = {size: next(n for n, c in split.items() if c.group_size == size) for size in sizes}
        said = ", ".join(f"{name!r} over {size}" for size, name in named.items())
        raise PlanError(f"one mesh dimension has one size, and this plan has {said}; take one")
    tensors: dict[str, Tensor] = dict.fromkeys(graph.sources, "rows")
    styles = {}
    for layer in graph.layers:
        reads: Tensor = "rows"
        if any(tensors[name] == "features" for name in layer.inputs):
            reads = "features"
        if layer.name not in split:
            tensors[layer.name] = reads
            continue
        inside = split[layer.name].scheme == "shard_out" and _stays(plan, split, layer.name)
        tensors[layer.name] = "features" if inside else "rows"
        style: Literal["colwise", "rowwise"] = "rowwise"
        if split[layer.name].scheme == "shard_out":
            style = "colwise"
        styles[layer.name] = ModuleStyle(style, reads, tensors[layer.name])
    sharded = {w.name for name in split for w in graph[name].weights if w.trainable}
    return ModulePlan(
        graph.source.name,
        plan.world_size,
        sizes[0] if sizes else 1,
        styles,
        tuple(name for name in graph.trainable if name not in sharded),
        tuple(name for name in graph.trainable if name in sharded),
        () if split else _blocks(graph),
    )


def _check(plan: PlanOfModules) -> None:
    """Refuses what concerns no single layer."""
    if plan.rounds != "BK":
        raise PlanError(
            f"rounds {plan.rounds!r} have no name in torch; plan.with_rounds('BK') has one"
        )
    if plan.row_shares is not None:
        raise PlanError(
            f"rows are {':'.join(f'{share:g}' for share in plan.row_shares)}, and torch's Shard(0) "
            "means equal ones; plan.with_rows(None) has these"
        )
    if plan.shard_tokens:
        raise PlanError(
            "shard_tokens divides tokens between cut layers, which this export does not say; "
            "plan.with_shard_tokens(False) has own rows there"
        )
    normed = [layer.name for layer in plan.graph.layers if layer.of_batch]
    if plan.batch_norm == "synchronized" and normed:
        raise PlanError(
            f"{normed[0]!r}: synchronized batch norm is a module of its own in torch, "
            "nn.SyncBatchNorm.convert_sync_batchnorm(module); plan.with_batch_norm('local') leaves "
            "it as it is"
        )
    for name, choice in plan.layers.items():
        if choice.recompute:
            raise PlanError(
                f"{name!r}: recomputation is torch.utils.checkpoint's, in the model's own code; "
                "plan.with_recompute('*', recompute=False) takes it back"
            )


def _check_layer(plan: PlanOfModules, layer: Layer, choice: LayerPlan) -> None:
    """Refuses a split layer that has no style."""
    known = layer.target == "torch.nn.Linear" and choice.scheme in ("shard_out", "shard_in")
    if not known:
        raise PlanError(
            f"{layer.name!r}: {choice.scheme} of {layer.target or layer.kind} has no style in "
            "torch: shard_out and shard_in of nn.Linear have; "
            f"plan.with_layer({layer.name!r}, scheme='replicate')"
        )
    if layer.name in plan.graph.shares_weights:
        raise PlanError(
            f"{layer.name!r} shares weights with another layer, and would be cut twice; "
            f"plan.with_layer({layer.name!r}, scheme='replicate')"
        )
    # The matrix; a bias of shard_in lies on one rank here, and on all as torch has it.
    placed = plan.flow.weights[layer.weights[0].name].placement
    if isinstance(placed, Shard) and placed.blocks > 1:
        raise PlanError(
            f"{layer.name!r}: of each of {placed.blocks} blocks of features a rank has a piece, as "
            "of query, key and value in one, and torch's Shard means one piece of all; "
            f"plan.with_layer({layer.name!r}, scheme='replicate')"
        )
    if isinstance(placed, Shard) and len(set(placed.sizes)) > 1:
        pieces = "/".join(map(str, placed.sizes))
        raise PlanError(
            f"{layer.name!r}: pieces of {pieces} are not those of torch's Shard, which are "
            f"equal where {placed.extent} is a multiple of {choice.group_size}; "
            "shares=None, or another group size"
        )


def _stays(plan: PlanOfModules, split: Mapping[str, LayerPlan], name: str) -> bool:
    """Whether a layer's output stays cut by features until split layers read it."""
    if name in plan.graph.outputs:
        return False
    for reader in plan.graph.consumers[name]:
        if reader in split:
            continue
        cut = isinstance(plan.flow.outputs[reader].placement, Shard)
        several = len(set(plan.graph[reader].inputs)) > 1
        ways = plan.graph[reader].propagations
        counts = any(not way.of_tokens for way in ways)  # heads, which are fewer on a rank
        if plan.flow.edges[name, reader] or not cut or several or counts:
            return False
        if not _stays(plan, split, reader):
            return False
    return True


def _blocks(graph: Graph) -> tuple[str, ...]:
    """The numbered containers that hold parameters: a network's repeated parts."""
    found: dict[str, None] = {}
    for layer in graph.layers:
        parts = layer.name.split(".")
        if layer.parameters and layer.kind != "parameter":
            numbered = [i for i, part in enumerate(parts[:-1]) if part.isdigit()]
            if numbered:
                found.setdefault(".".join(parts[: numbered[0] + 1]))
    return tuple(found)
