"""The plan: how each layer of a model is split, over how many ranks; an immutable value."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

from workbench.plan.extension.user_object import Own
from workbench.plan.graph.graph import Graph, Layer
from workbench.plan.io.errors import PlanError, unknown
from workbench.plan.io.files import about, text_of, toml_of
from workbench.plan.io.html import Markup, save_value
from workbench.plan.placement.flow import Flow, flow_of
from workbench.plan.placement.layer_plan import (
    LayerPlan,
    as_scheme,
    checked,
    checked_tokens,
    choose,
    matching,
    require,
    segments_of,
)
from workbench.plan.placement.placement import ROWS, checked_shares, require_group, shared_out
from workbench.plan.placement.presets import Shares, explained, filters, hybrid, shares_of_rows
from workbench.plan.placement.rounds import ROUNDS, Rounds, RoundsError, Tail, tail_of
from workbench.plan.placement.rules import Tokens
from workbench.plan.placement.tied import check_evaluated, check_tied, together
from workbench.plan.plans import table, toml
from workbench.plan.plans.module_plan import ModulePlan, module_plan_of

if TYPE_CHECKING:
    import pandas

BatchNorm = Literal["local", "synchronized"]
BATCH_NORMS: tuple[BatchNorm, ...] = ("local", "synchronized")


@dataclass(frozen=True, repr=False)
class Plan:
    """How a model is split over `world_size` ranks. Plans are values: changes return a new one.

    Attributes:
        graph: the model.
        world_size: the number of ranks.
        layers: the choice of each layer that has one; the others are replicated, or follow their
            input, and are not recomputed.
        batch_norm: the statistics of batch norm. "local": each rank (each shard group where the
            layer is sharded) normalises with the statistics of its own rows, as torch's DDP does,
            so that the result depends on the split; "synchronized": with those of the whole batch,
            exact at any split.
        rounds: the part of a group's rows that the sharded tail processes at a time: "BK" all, "B"
            one member's, "B/K" a part of every member's (`plan/placement/rounds.py`). All three
            give the same gradients; the tail's activations shrink by the group's size.
        row_shares: the relative rows of a batch for each rank, zero included [ranks]; None: equal.
            Any shares give the same gradients (`plan/placement/placement.py`).
        shard_tokens: whether what lies between cut layers is divided by tokens, and not by rows:
            sequence parallelism. True: equally; or the relative tokens of each rank of a group.

    Raises:
        PlanError: an invalid choice; the text names the layer and what is valid.
    """

    graph: Graph
    world_size: int
    layers: Mapping[str, LayerPlan] = field(default_factory=dict)
    batch_norm: BatchNorm = "local"
    rounds: Rounds = "BK"
    row_shares: tuple[float, ...] | None = None
    shard_tokens: Tokens = False

    def __post_init__(self) -> None:
        size = self.world_size
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise PlanError(f"world_size must be a positive integer, got {size!r}")
        if self.batch_norm not in BATCH_NORMS:
            raise PlanError(unknown("batch_norm mode", str(self.batch_norm), BATCH_NORMS))
        if self.rounds not in ROUNDS:
            raise PlanError(unknown("rounds", str(self.rounds), ROUNDS))
        chosen = checked(self.graph, self.layers, size)
        check_tied(self.graph, chosen)
        object.__setattr__(self, "layers", MappingProxyType(chosen))
        object.__setattr__(self, "row_shares", checked_shares(self.row_shares, size))
        object.__setattr__(self, "shard_tokens", checked_tokens(self.shard_tokens, chosen))
        if not self.is_at_hand:
            return
        if any(choice.is_own for choice in chosen.values()):
            _ = self.flow  # refuses what a scheme must not state
        check_evaluated(self.graph, lambda: self.flow)
        if self.rounds != "BK":
            _ = self.tail  # refuses what cannot be

    def __hash__(self) -> int:
        choices = tuple(self.layers.items())
        rest = (self.batch_norm, self.rounds, self.row_shares, self.shard_tokens)
        return hash((self.graph, self.world_size, choices, *rest))

    def __getstate__(self) -> dict[str, Any]:
        names = ("graph", "world_size", "batch_norm", "rounds", "row_shares", "shard_tokens")
        return {**{name: getattr(self, name) for name in names}, "layers": dict(self.layers)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        for name, value in {**state, "layers": MappingProxyType(state["layers"])}.items():
            object.__setattr__(self, name, value)

    @classmethod
    def data_parallel(
        cls, graph: Graph, world_size: int, shares: Sequence[float] | None = None
    ) -> "Plan":
        """Every layer replicated, every rank with its own rows: `shares` of the batch, or equal."""
        return cls(graph, world_size, row_shares=None if shares is None else tuple(shares))

    @classmethod
    def hybrid(
        cls,
        graph: Graph,
        world_size: int,
        group_size: int | None = None,
        *,
        rounds: Rounds = "BK",
        shard_tokens: Tokens = False,
    ) -> "Plan":
        """SplitBrain: replicated convolutions; linear layers and attention sharded in groups.

        Which of them are sharded follows from their parameters and FLOPs, by a rule that
        `repr(plan)` states along with its results for this model (`plan/placement/presets.py`).
        Attention is sharded by heads. A linear layer that reads the sharded output of another
        through element-wise layers is sharded by its input (`shard_in`), so that the pair needs one
        reduction; the others are sharded by their output (`shard_out`).

        Args:
            graph: the model.
            world_size: the number of ranks.
            group_size: the number of ranks that share one copy of the sharded layers; None: all.
            rounds: the rounds of the sharded tail: "BK", "B" or "B/K".
            shard_tokens: whether what lies between sharded layers is divided by tokens.

        Raises:
            PlanError: `group_size` does not divide `world_size`, or the sharded layers cannot run
                in these rounds.
        """
        k = require_group(group_size, world_size)
        layers = hybrid(graph, k)
        return cls(graph, world_size, layers, rounds=rounds, shard_tokens=shard_tokens)

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
        """Heterogeneous model parallelism: every layer's filters are divided by relative speeds.

        Layers alternate between filters (`shard_out`) and channels (`shard_in`), so that a pair
        needs one reduction (`plan/placement/presets.py`). Rows are divided alike, where `shares`
        is one for all layers.

        Args:
            graph: the model.
            world_size: the number of ranks.
            shares: the relative filters of each rank of a group, zero included; or such for each
                pattern of layer names, as {"features.*": (3, 1)}; None: equal.
            group_size: the number of ranks that share one copy; None: all.
            grain: the filters that stay together, where a layer has enough of them.

        Raises:
            PlanError: invalid shares, which are one number for each rank of a group, or a group
                size that does not divide `world_size`.
        """
        k = require_group(group_size, world_size)
        every = shares_of_rows(shares, world_size, k)
        return cls(graph, world_size, filters(graph, k, shares, grain), row_shares=every)

    @property
    def is_at_hand(self) -> bool:
        """Whether this process has all its schemes, without which nothing follows from it.

        A plan's text holds the name and the file of a person's own scheme. Only ranks open the
        file (`plan/extension/user_object.py`), and a name is imported with trust alone; elsewhere
        such a plan can be kept, shown by name and submitted.
        """
        return all(choice.is_at_hand for choice in self.layers.values())

    def with_own(self, change: Callable[[Own, str], Own], place: str = "") -> "Plan":
        """The plan with all own schemes changed; the same one where none of them is.

        Args:
            change: (scheme, its place) -> what stands there instead.
            place: the plan's own place, for errors.
        """
        prefix = f"{place}." if place else ""
        changed = {
            name: replace(choice, scheme=new)
            for name, choice in self.layers.items()
            if isinstance(choice.scheme, Own)
            and (new := change(choice.scheme, f"{prefix}layers.{name}.scheme")) is not choice.scheme
        }
        return replace(self, layers={**self.layers, **changed}) if changed else self

    def with_layer(
        self,
        name: str,
        *,
        scheme: object = None,
        group_size: int | None = None,
        shares: Sequence[float] | None = None,
        recompute: bool | None = None,
    ) -> "Plan":
        """The plan with another choice for one layer.

        Layers that share its weights hold them alike: they get the scheme that does so. With an
        embedding cut by the vocabulary (`shard_in`) goes an unembedding by `shard_out`.

        If the sharded layers could then no longer run in the plan's rounds, the new plan falls back
        to "BK", with a warning that names the layer in the way.

        Args:
            name: the layer's name.
            scheme: the scheme of the layer: the name of a built-in one, or one of your own, as in
                `LayerPlan`; None: unchanged.
            group_size: the number of ranks in its groups; None: unchanged, or the whole world if it
                was in none.
            shares: the relative sizes of the pieces; None: equal, or as the input is sharded;
                unchanged if `recompute` alone is given. Shares of an attention layer divide whole
                heads.
            recompute: whether its forward pass is recomputed in the backward pass; None: unchanged.

        Raises:
            PlanError: an unknown layer, or a choice that it cannot have.
        """
        alone = scheme is None and group_size is None and shares is None
        if alone and recompute is not None:
            require(self.graph, name, [x.name for x in self.graph.layers if x.rows])
            return replace(self, layers=choose([name], self.layers, recompute))
        require(self.graph, name)
        now = self.layers.get(name, LayerPlan())
        recompute = now.recompute if recompute is None else recompute
        scheme = now.scheme if scheme is None else as_scheme(scheme)
        if group_size is None:
            apart = now.group_size if now.group_size > 1 else self.world_size
            group_size = 1 if scheme == "replicate" else apart
        kept = None if shares is None else tuple(shares)
        choice, size = LayerPlan(scheme, group_size, kept, recompute), self.world_size
        layers = {**self.layers, **together(self.graph, name, choice, self.layers, size)}
        try:
            return replace(self, layers=layers)
        except RoundsError as error:
            warnings.warn(f"rounds {self.rounds!r} became 'BK': {error}", stacklevel=2)
            return replace(self, layers=layers, rounds="BK")

    def with_recompute(self, *layers: str, recompute: bool = True) -> "Plan":
        """The plan in which these layers are recomputed in the backward pass, or are not.

        Successive layers form one segment, which saves only its inputs and is recomputed as a
        whole; excluding a layer starts a new segment, so that not all activations are alive at once
        (`plan/placement/layer_plan.py` describes the cost).

        Args:
            layers: the names, or patterns such as "features.*" for all matching layers that process
                samples.
            recompute: whether they are recomputed; False takes it back.

        Raises:
            PlanError: a pattern that matches no layer, or a layer that cannot be recomputed.
        """
        names = matching(layers, self.graph)
        return replace(self, layers=choose(names, self.layers, recompute))

    @cached_property
    def segments(self) -> tuple[tuple[str, ...], ...]:
        """The segments of layers that are recomputed in the backward pass, each as a whole."""
        chosen = {name for name, choice in self.layers.items() if choice.recompute}
        parted = self.tail.layers if self.rounds != "BK" and self.tail else frozenset()
        return segments_of(self.graph, chosen, parted)

    def with_batch_norm(self, mode: BatchNorm) -> "Plan":
        """The plan with "local" or "synchronized" statistics of batch norm."""
        return replace(self, batch_norm=mode)

    def with_world_size(self, world_size: int) -> "Plan":
        """The same choices, group sizes and shares on another number of ranks.

        Raises:
            PlanError: a group size does not divide the number of ranks; the text names the layer.
        """
        plan = replace(self, world_size=world_size)
        if "flow" in self.__dict__:
            plan.__dict__["flow"] = self.flow  # groups are placed alike, however many
        return plan

    def with_rounds(self, rounds: Rounds) -> "Plan":
        """The plan with "BK", "B" or "B/K" rounds of its sharded tail.

        Raises:
            PlanError: unknown rounds, or the layers after the gather cannot run in them; the text
                names the layer in the way.
        """
        return replace(self, rounds=rounds)

    def with_rows(self, shares: Sequence[float] | None) -> "Plan":
        """The plan with these relative rows of a batch for each rank; None: equal.

        Raises:
            PlanError: the shares are not one number >= 0 for each rank, or all are zero.
        """
        return replace(self, row_shares=None if shares is None else tuple(shares))

    def with_shard_tokens(self, tokens: Tokens = True) -> "Plan":
        """The plan in which what lies between cut layers is divided by tokens, or by rows.

        Between two cut layers a value [rows, tokens, features] has then some tokens of all rows of
        the group on each rank, where each token is computed by itself: norms, dropout, residual
        sums. A sum is scattered by tokens, and gathered before the next cut layer. Rows cost as
        much traffic and memory, unless a group has fewer of them than ranks.

        Args:
            tokens: the relative tokens of each rank of a group; True: equal; False: own rows.

        Raises:
            PlanError: the shares are not one number >= 0 for each rank of a group, or all are zero.

        Source: Megatron-LM's sequence parallelism (arXiv:2205.05198, sec. 4.2.2).
        """
        return replace(self, shard_tokens=tokens)

    def rows_of(self, count: int) -> tuple[int, ...]:
        """The rows that each rank has of a batch of `count` rows [ranks]."""
        return shared_out(count, self.row_shares, self.world_size)

    def synchronizes(self, layer: Layer) -> bool:
        """Whether a layer is a batch norm that uses the statistics of all ranks' rows."""
        return layer.of_batch and self.batch_norm == "synchronized"

    @cached_property
    def tail(self) -> Tail | None:
        """The layers that can run in rounds; None where nothing is gathered.

        Raises:
            PlanError: the sharded layers are no tail, so that only rounds "BK" are possible.
        """
        return tail_of(self.graph, self.flow)

    @cached_property
    def flow(self) -> Flow:
        """The placement of every activation and weight, and the conversions between them.

        Raises:
            PlanError: an own scheme that is not at hand, or states what cannot be.
        """
        return flow_of(self.graph, self.layers, tokens=self.shard_tokens)

    @cached_property
    def evaluation(self) -> "Plan":
        """The plan under which the model evaluates: this one, unless its layers differ then.

        Layers with weights read the same layouts as in training, so that weights stay in place;
        those that training does not call have whole ones.
        """
        graph = self.graph.evaluation
        if graph is None:
            return self
        kept = {name: replace(choice, recompute=False) for name, choice in self.layers.items()}
        names = {layer.name for layer in graph.layers}
        choices = {n: choice for n, choice in kept.items() if n in names and choice != LayerPlan()}
        plan = replace(self, graph=graph, layers=choices, rounds="BK")
        held = {
            layer.name: self.flow.inputs.get(layer.name, ROWS)
            for layer in graph.layers
            if layer.weights and layer.kind != "parameter"
        }
        plan.__dict__["flow"] = flow_of(graph, plan.layers, held, self.shard_tokens)
        return plan

    def module_plan(self) -> ModulePlan:
        """The plan in torch's own words: `wb.to_dtensor` and `wb.to_fsdp` make objects of it.

        Raises:
            PlanError: torch cannot say it; the text names the layer, the reason, and a remedy.
        """
        return module_plan_of(self)

    def parameters_of(self, rank: int) -> int:
        """The number of trainable elements that a rank holds."""
        placed = self.flow.weights.values()
        return sum(weight.piece_numel(rank) for weight in placed if weight.trainable)

    def to_toml(self) -> str:
        """The plan as readable, editable text."""
        return toml.to_toml(self)

    @classmethod
    def from_toml(cls, text: str, graph: Graph | None = None, *, trust: bool = False) -> "Plan":
        """The plan of a text written by `to_toml`.

        Args:
            text: the text, in TOML.
            graph: the model that the plan must be for; None: the one described in the text.
            trust: whether to import the schemes that the text names, which runs their author's
                code. Without it such a plan can be shown, compared, changed and saved.

        Raises:
            PlanError: the text is not TOML, an entry has a wrong name, type or value, or the plan
                is for another model.
        """
        plan = cls(**toml.read(toml_of(text, PlanError), graph, trust=trust))
        if plan.is_at_hand:
            plan._check_described()
        return plan

    def _check_described(self) -> None:
        """Places all layers, which a description that somebody made up need not allow."""
        try:
            _ = self.flow
        except PlanError:
            raise
        except (ValueError, ArithmeticError, LookupError, AssertionError, StopIteration) as error:
            raise PlanError(
                f"[graph]: the layers cannot have these schemes, as the model is described: {error}"
            ) from error

    def save(self, path: str | Path) -> None:
        """Writes `to_toml()` to a file; to "x.svg", "x.html" or "x.csv" what is shown of it."""
        save_value(self, path, self.to_toml, self.svg)

    def to_frame(self) -> "pandas.DataFrame":
        """One line for each layer that holds parameters or is recomputed: how it is split."""
        return table.as_frame(self)

    def svg(self) -> str:
        """What each rank holds of each layer, as a picture; a document of its own."""
        return table.pieces_svg(self)

    @classmethod
    def load(cls, path: str | Path, graph: Graph | None = None, *, trust: bool = False) -> "Plan":
        """Reads a file written by `save`, or by hand; as `from_toml`.

        Raises:
            PlanError: the text is not a valid plan, or the plan is for another model.
        """
        with about(path, PlanError):
            return cls.from_toml(text_of(path, PlanError), graph, trust=trust)

    def __repr__(self) -> str:
        return "\n".join([table.headline(self), *explained(self.graph, self.layers)])

    def __str__(self) -> str:
        return table.as_text(self)

    def _repr_html_(self) -> Markup:
        return table.as_html(self)
