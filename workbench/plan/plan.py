"""The plan: which layer of a model is split how, over how many ranks. A value."""

import tomllib
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from workbench.plan import presets, row_shares, serial, show
from workbench.plan.choice import LayerPlan, checked, require
from workbench.plan.errors import PlanError
from workbench.plan.explain import explained
from workbench.plan.filters import Shares, filters, shares_of_rows
from workbench.plan.flow import Flow, flow_of
from workbench.plan.graph import Graph, Layer, unknown
from workbench.plan.mesh import require_group
from workbench.plan.recompute import choose, matching, segments_of
from workbench.plan.tail import ROUNDS, Rounds, RoundsError, Tail, tail_of

BatchNorm = Literal["local", "synchronized"]
BATCH_NORMS: tuple[BatchNorm, ...] = ("local", "synchronized")


@dataclass(frozen=True, repr=False)
class Plan:
    """How a model is split over `world_size` ranks. Plans are values: changes return a new one.

    Attributes:
        graph: the model.
        world_size: number of ranks.
        layers: the choice of each layer that has one; the others are replicated, or follow
            their input, and keep what backward needs.
        batch_norm: "local": each rank (each shard group where the layer lies over groups)
            normalizes with the statistics of its own rows, as torch's DDP does, so that the
            result depends on the split by nature; "synchronized": with those of the whole
            batch, exact at any split.
        rounds: how much of a group's rows the sharded tail sees at a time: "BK" all at once,
            "B" one member's, "B/K" a part of every member's (`plan/tail.py`). All three give
            the same gradients; the tail's activations shrink by the group's size.
        row_shares: relative rows of a batch for each rank, zero included; None: equal. Any
            shares give the same gradients (`plan/row_shares.py`).

    Raises:
        PlanError: a choice that cannot be; the text names the layer and what is valid.
    """

    graph: Graph
    world_size: int
    layers: Mapping[str, LayerPlan] = field(default_factory=dict)
    batch_norm: BatchNorm = "local"
    rounds: Rounds = "BK"
    row_shares: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        size = self.world_size
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise PlanError(f"world_size must be a positive integer, got {size!r}")
        if self.batch_norm not in BATCH_NORMS:
            raise PlanError(unknown("batch_norm mode", str(self.batch_norm), BATCH_NORMS))
        if self.rounds not in ROUNDS:
            raise PlanError(unknown("rounds", str(self.rounds), ROUNDS))
        chosen = checked(self.graph, self.layers, size)
        object.__setattr__(self, "layers", MappingProxyType(chosen))
        object.__setattr__(self, "row_shares", row_shares.checked(self.row_shares, size))
        if self.rounds != "BK":
            _ = self.tail  # refuses what cannot be

    def __hash__(self) -> int:
        choices = tuple(self.layers.items())
        rest = (self.batch_norm, self.rounds, self.row_shares)
        return hash((self.graph, self.world_size, choices, *rest))

    def __getstate__(self) -> dict[str, Any]:
        names = ("graph", "world_size", "batch_norm", "rounds", "row_shares")
        return {**{name: getattr(self, name) for name in names}, "layers": dict(self.layers)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        for name, value in {**state, "layers": MappingProxyType(state["layers"])}.items():
            object.__setattr__(self, name, value)

    @classmethod
    def data_parallel(
        cls, graph: Graph, world_size: int, shares: Sequence[float] | None = None
    ) -> "Plan":
        """Every layer replicated, every rank its own rows: `shares` of the batch, or equal ones."""
        return cls(graph, world_size, row_shares=None if shares is None else tuple(shares))

    @classmethod
    def hybrid(
        cls,
        graph: Graph,
        world_size: int,
        group_size: int | None = None,
        *,
        rounds: Rounds = "BK",
    ) -> "Plan":
        """SplitBrain: convolutions replicated, linear layers and attention sharded in groups.

        Which of them follows from their parameters and FLOPs, by a rule that `repr(plan)` states
        along with what it says of this model (`plan/presets.py`). Attention is cut by heads. A
        linear layer that reads the cut output of another through element-wise layers is cut by
        its input (`shard_in`), so that the pair needs one reduction; the others are cut by their
        output (`shard_out`).

        Args:
            graph: the model.
            world_size: number of ranks.
            group_size: ranks that share one copy of the layers that are cut; None: all.
            rounds: "BK", "B" or "B/K".

        Raises:
            PlanError: `group_size` does not divide `world_size`, or the layers that are cut
                cannot run in these rounds.
        """
        k = require_group(group_size, world_size)
        return cls(graph, world_size, presets.hybrid(graph, k), rounds=rounds)

    @classmethod
    def filters(
        cls,
        graph: Graph,
        world_size: int,
        shares: Shares = None,
        *,
        group_size: int | None = None,
        grain: int = 8,
    ) -> "Plan":
        """Heterogeneous model parallelism: every layer's filters shared out by relative speeds.

        Layers alternate between filters (`shard_out`) and channels (`shard_in`), so that a pair
        needs one reduction (`plan/filters.py`). What is computed row by row is shared out alike,
        where `shares` is one for all layers.

        Args:
            graph: the model.
            world_size: number of ranks.
            shares: relative filters of each rank of a group, zero included; or such for each
                pattern of layer names, as {"features.*": (3, 1)}; None: equal.
            group_size: ranks that share out one copy; None: all.
            grain: filters that are handed out together, where a layer has enough of them.

        Raises:
            PlanError: shares that are not one number for each rank of a group, or a group size
                that does not divide `world_size`.
        """
        k = require_group(group_size, world_size)
        every = shares_of_rows(shares, world_size, k)
        return cls(graph, world_size, filters(graph, k, shares, grain), row_shares=every)

    def with_layer(
        self,
        name: str,
        *,
        scheme: str | None = None,
        group_size: int | None = None,
        shares: Sequence[float] | None = None,
        recompute: bool | None = None,
    ) -> "Plan":
        """The plan with another choice for one layer.

        Where the sharded layers could then no longer run in the plan's rounds, the new plan
        falls back to "BK", with a warning that names the layer in the way.

        Args:
            name: the layer.
            scheme: None: as it is.
            group_size: None: as it is, or the whole world where the layer was not in groups.
            shares: relative sizes of the pieces; None: equal, or as the input lies; as they are
                where `recompute` alone is given. Of an attention layer they hand out whole heads.
            recompute: whether its forward pass runs again in backward; None: as it is.

        Raises:
            PlanError: no such layer, or a choice that it cannot have.
        """
        alone = scheme is None and group_size is None and shares is None
        if alone and recompute is not None:
            require(self.graph, name, [x.name for x in self.graph.layers if x.rows])
            return replace(self, layers=choose([name], self.layers, recompute))
        require(self.graph, name)
        now = self.layers.get(name, LayerPlan())
        recompute = now.recompute if recompute is None else recompute
        scheme = now.scheme if scheme is None else scheme
        if group_size is None:
            apart = now.group_size if now.group_size > 1 else self.world_size
            group_size = 1 if scheme == "replicate" else apart
        kept = None if shares is None else tuple(shares)
        layers = {**self.layers, name: LayerPlan(scheme, group_size, kept, recompute)}
        try:
            return replace(self, layers=layers)
        except RoundsError as error:
            warnings.warn(f"rounds {self.rounds!r} became 'BK': {error}", stacklevel=2)
            return replace(self, layers=layers, rounds="BK")

    def with_recompute(self, *layers: str, recompute: bool = True) -> "Plan":
        """The plan in which these layers' forward passes run again in backward, or do not.

        Layers that follow each other form one segment, which keeps only its inputs and is then
        computed again as a whole; a layer that is left out parts two segments, so that not all
        of them are held at once (`plan/recompute.py` says what it costs).

        Args:
            layers: names, or patterns such as "features.*" for all layers whose name fits that
                see samples.
            recompute: False takes it back.

        Raises:
            PlanError: a pattern that fits no layer, or a layer that cannot be computed again.
        """
        names = matching(layers, self.graph)
        return replace(self, layers=choose(names, self.layers, recompute))

    @cached_property
    def segments(self) -> tuple[tuple[str, ...], ...]:
        """The runs of layers that are computed again in backward, each as one."""
        chosen = {name for name, choice in self.layers.items() if choice.recompute}
        parted = self.tail.layers if self.rounds != "BK" and self.tail else frozenset()
        return segments_of(self.graph, chosen, parted)

    def with_batch_norm(self, mode: BatchNorm) -> "Plan":
        """The plan with "local" or "synchronized" statistics of batch norm."""
        return replace(self, batch_norm=mode)

    def with_world_size(self, world_size: int) -> "Plan":
        """The same choices, group sizes and shares on another number of ranks.

        Raises:
            PlanError: a group size does not divide it; the text names the layer.
        """
        plan = replace(self, world_size=world_size)
        if "flow" in self.__dict__:
            plan.__dict__["flow"] = self.flow  # groups lie alike, however many there are
        return plan

    def with_rounds(self, rounds: Rounds) -> "Plan":
        """The plan with "BK", "B" or "B/K" rounds of its sharded tail.

        Raises:
            PlanError: no such rounds, or the layers behind the gather cannot run in them; the
                text names the layer in the way.
        """
        return replace(self, rounds=rounds)

    def with_rows(self, shares: Sequence[float] | None) -> "Plan":
        """The plan with these relative rows of a batch for each rank; None: equal.

        Raises:
            PlanError: not one number >= 0 for each rank, or all are zero.
        """
        return replace(self, row_shares=None if shares is None else tuple(shares))

    def rows_of(self, count: int) -> tuple[int, ...]:
        """The rows that each rank brings, of a batch of `count` rows."""
        return row_shares.shared_out(count, self.row_shares, self.world_size)

    def synchronizes(self, layer: Layer) -> bool:
        """Whether a layer is a batch norm that uses the statistics of all ranks' rows."""
        return layer.of_batch and self.batch_norm == "synchronized"

    @cached_property
    def tail(self) -> Tail | None:
        """What runs in rounds; None where nothing is gathered, and a step is one round.

        Raises:
            PlanError: the sharded layers are no tail, so that only rounds "BK" are possible.
        """
        return tail_of(self.graph, self.flow)

    @cached_property
    def flow(self) -> Flow:
        """The placement of every activation and weight, and the conversions between."""
        return flow_of(self.graph, self.layers)

    @cached_property
    def evaluation(self) -> "Plan":
        """The plan under which the model evaluates: this one, unless it takes another way then.

        Layers with weights read as in training, so that these lie as they do there.
        """
        graph = self.graph.evaluation
        if graph is None:
            return self
        kept = {name: replace(choice, recompute=False) for name, choice in self.layers.items()}
        names = {layer.name for layer in graph.layers}
        choices = {n: choice for n, choice in kept.items() if n in names and choice != LayerPlan()}
        plan = replace(self, graph=graph, layers=choices, rounds="BK")
        held = {
            layer.name: self.flow.inputs[layer.name]
            for layer in graph.layers
            if layer.weights and layer.kind != "parameter" and layer.name in self.flow.inputs
        }
        plan.__dict__["flow"] = flow_of(graph, plan.layers, held)
        return plan

    def parameters_of(self, rank: int) -> int:
        """Number of trainable elements that a rank holds."""
        placed = self.flow.weights.values()
        return sum(weight.piece_numel(rank) for weight in placed if weight.trainable)

    def to_toml(self) -> str:
        """The plan as text that a person can read and edit."""
        return serial.to_toml(self)

    @classmethod
    def from_toml(cls, text: str, graph: Graph | None = None) -> "Plan":
        """The inverse of `to_toml`.

        Args:
            text: TOML.
            graph: the model that the plan must be for; None: the one described in the text.

        Raises:
            PlanError: the text is no TOML, an entry has a wrong name, type or value, or the
                plan is for another model.
        """
        try:
            content = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise PlanError(f"not TOML: {error}") from None
        fields = serial.read(content, graph)
        return cls(**fields)

    def save(self, path: str | Path) -> None:
        """Writes `to_toml()` to a file."""
        Path(path).write_text(self.to_toml())

    @classmethod
    def load(cls, path: str | Path, graph: Graph | None = None) -> "Plan":
        """Reads a file written by `save`, or by hand."""
        return cls.from_toml(Path(path).read_text(), graph)

    def __repr__(self) -> str:
        return "\n".join([show.headline(self), *explained(self)])

    def __str__(self) -> str:
        return show.as_text(self)

    def _repr_html_(self) -> str:
        return show.as_html(self)
