"""What `verify` found: the split model against the unsplit one."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

from workbench.plan.graph.graph import Graph
from workbench.plan.io.html import Markup, element, frame_of, joined, lines, save, table

if TYPE_CHECKING:
    import pandas

KINDS = ("output", "gradient", "weight", "buffer", "optimizer", "evaluation", "repeat")
TOLERANCE = {"fp64": 1e-10, "fp32": 1e-4}
# Where rounding alone moves the unsplit model by more than the tolerance: by how many times this
# much the split one may differ. Both round, in different orders, and other ReLUs flip in each.
MARGIN = 10.0
# But never by so much as a wrong factor does: what is counted twice is off by 1, what is halved by
# 1/2, what one of four ranks leaves out by 1/4.
MOST = 0.24
ROUNDED = (
    "rounding alone moves the unsplit model by more than 1e-4 (ReLUs flip, small variances "
    f"divide): the tolerance is 10 times that, and {MOST} at most, less than what a wrong factor "
    "makes; verify in fp64 tells smaller mistakes from rounding"
)


NARROW = (
    "the model computes in fp32 by itself, and the order of its rows alone moves it by more than "
    "1e-10: the tolerance is 10 times that"
)


@dataclass(frozen=True)
class Difference:
    """How far one tensor of the split model is from the unsplit one's.

    Attributes:
        what: "output", "gradient", "weight", "buffer", "optimizer" (what it remembers),
            "evaluation" (in evaluation mode, of a test batch) or "repeat" (a second run of the
            split model against its first).
        name: the name of the tensor in the state_dict; for an output, the layer that gives it; for
            an optimizer, "<state>/<parameter>"; for an evaluation, "loss" or "accuracy".
        rank: the rank with the largest difference.
        error: the maximum of |split - whole| / scale. For an output, the scale is its largest
            entry; for a gradient too, but no less than a thousandth of the model's largest (a bias
            before a batch norm has a gradient of zero: rounding would be its whole value); for
            weights, buffers and each state of the optimizer, after several steps, it is the largest
            of the model's; for a loss or an accuracy it is 1, or the loss if that is more.
        rounding: how far the unsplit model in fp32 is from itself in fp64, measured alike: what no
            order of summation can be expected to beat. In fp64 zero, but for a model that computes
            in fp32 by itself. For "repeat", what the kernels of the ranks' devices leave open: on
            CPUs nothing.
    """

    what: str
    name: str
    rank: int
    error: float
    rounding: float = 0.0

    @staticmethod
    def file(found: Path, rank: int) -> Path:
        """The file of what one rank has found, of those that are called so."""
        return found.with_name(f"{found.name}-{rank}.json")


@dataclass(frozen=True)
class Coverage:
    """How much of a model a verification has looked at.

    Attributes:
        operations: how many operations act on the batch, and
        seen: how many of these lie on a way from the input to an output that was compared.
        parameters: how many parameters are trained, and
        gradients: how many of these had a gradient that was compared.
        missing: names of the operations and parameters that were not.
    """

    operations: int
    seen: int
    parameters: int
    gradients: int
    missing: tuple[str, ...] = ()

    @classmethod
    def of(cls, graph: Graph, differences: Iterable["Difference"]) -> "Coverage":
        found = {(difference.what, difference.name) for difference in differences}
        reached = {name for name in graph.outputs if ("output", name) in found}
        for layer in reversed(graph.layers):
            if layer.name in reached:
                reached.update(layer.inputs)
        operations = [layer.name for layer in graph.layers if layer.rows > 0]
        unseen = [name for name in operations if name not in reached]
        without = [name for name in graph.trainable if ("gradient", name) not in found]
        return cls(
            operations=len(operations),
            seen=len(operations) - len(unseen),
            parameters=len(graph.trainable),
            gradients=len(graph.trainable) - len(without),
            missing=(*unseen, *without),
        )

    def __str__(self) -> str:
        return (
            f"covered {self.seen} of {self.operations} operations, gradients of "
            f"{self.gradients} of {self.parameters} parameters"
        )


@dataclass(frozen=True)
class Verification:
    """The split model against one process with the same weights, data and optimizer.

    Attributes:
        model: the model's name.
        precision: "fp64" or "fp32".
        steps: optimizer updates made before weights and buffers were compared.
        differences: one for each output, gradient (of the first step), weight, buffer and state of
            the optimizer, for what evaluation gives, and for what a second run leaves.
        notes: what was treated specially, for people.
        coverage: how much of the model was looked at; None: not known.
    """

    model: str
    precision: str
    steps: int
    differences: tuple[Difference, ...]
    notes: tuple[str, ...] = ()
    coverage: Coverage | None = None

    @property
    def worst(self) -> Difference:
        """The tensor that is furthest off, measured by its tolerance."""
        return max(self.differences, key=self._beyond)

    def _beyond(self, difference: Difference) -> float:
        tolerance = self.tolerance(difference.what)
        if tolerance == 0:
            return float("inf") if difference.error > 0 else 0.0
        return difference.error / tolerance

    def tolerance(self, what: str) -> float:
        """The error up to which one of `KINDS` is rounding; two runs are to leave equal bits."""
        rounding = max((d.rounding for d in self.differences if d.what == what), default=0.0)
        if what == "repeat":
            return rounding
        return max(TOLERANCE[self.precision], min(MARGIN * rounding, MOST))

    @property
    def exact(self) -> bool:
        """Whether every difference is rounding, and a second run was the same."""
        return all(self.of(kind).error <= self.tolerance(kind) for kind in self.kinds)

    @property
    def repeatable(self) -> bool | None:
        """Whether two runs from one seed left the same; None: it ran once."""
        if "repeat" not in self.kinds:
            return None
        return self.of("repeat").error <= self.tolerance("repeat")

    @property
    def kinds(self) -> tuple[str, ...]:
        """What was compared, of `KINDS`."""
        found = {difference.what for difference in self.differences}
        return tuple(kind for kind in KINDS if kind in found)

    def of(self, what: str) -> Difference:
        """The worst difference of one kind."""
        return max((d for d in self.differences if d.what == what), key=lambda d: d.error)

    def __repr__(self) -> str:
        worst = self.worst
        verdict = "exact" if self.exact else "NOT EXACT"
        compared = sum(difference.what != "repeat" for difference in self.differences)
        return (
            f"<Verification {self.model} {self.precision}: {verdict}, "
            f"{compared} tensors, worst {worst.what} of {worst.name!r} on rank "
            f"{worst.rank}: {worst.error:.1e} (tolerance {self.tolerance(worst.what):.0e})"
            f"{''.join(f'; {said}' for said in self._said)}>"
        )

    @property
    def _said(self) -> tuple[str, ...]:
        """Beside how far off it is: whether two runs are one, and how much was looked at."""
        alike = {True: ("two runs are alike",), False: ("TWO RUNS DIFFER",), None: ()}
        covered = () if self.coverage is None else (str(self.coverage),)
        return alike[self.repeatable] + covered

    def to_frame(self) -> "pandas.DataFrame":
        """One line for each tensor that was compared: how far off it is, and what is allowed."""
        rows = (
            {**asdict(each), "tolerance": self.tolerance(each.what)} for each in self.differences
        )
        return frame_of(rows, [*(f.name for f in fields(Difference)), "tolerance"])

    def save(self, path: str | Path) -> None:
        """Writes it into a file: "x.csv" has all tensors, "x.html" a page.

        Raises:
            ValueError: the name has another ending.
        """
        save(self, path)

    def _repr_html_(self) -> Markup:
        rows = [
            (
                kind,
                str(sum(d.what == kind for d in self.differences)),
                f"{self.of(kind).error:.1e}",
                f"{self.tolerance(kind):.0e}",
                self.of(kind).name,
                str(self.of(kind).rank),
            )
            for kind in self.kinds
        ]
        head = ("compared", "tensors", "worst relative error", "tolerance", "where", "rank")
        verdict = "exact \N{CHECK MARK}" if self.exact else "not exact \N{BALLOT X}"
        said = (*self._said, *self.notes)
        if any(self.tolerance(kind) > TOLERANCE[self.precision] for kind in self.kinds):
            said = (*said, ROUNDED if self.precision == "fp32" else NARROW)
        ran = f", {self.precision}, {self.steps} steps: "
        line = joined([element("b", self.model), ran, element("b", verdict)])
        return element("div", element("p", lines([line, *said])), table(head, rows))
