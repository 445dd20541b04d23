"""What `verify` found: the split model against the unsplit one."""

from dataclasses import dataclass
from html import escape

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


@dataclass(frozen=True)
class Difference:
    """How far one tensor of the split model is from the unsplit one's.

    Attributes:
        what: "output", "gradient", "weight" or "buffer".
        name: of the tensor in the state_dict; for an output, the layer that gives it.
        rank: the rank with the largest difference.
        error: max |split - whole| / scale. For an output, the scale is its largest entry; for a
            gradient too, but no less than a thousandth of the model's largest (a bias before a
            batch norm has a gradient of zero: rounding would be its whole value); for weights
            and buffers, after several steps, it is the largest of the model's.
        rounding: how far the unsplit model in fp32 is from itself in fp64, measured alike: what
            no order of summation can be expected to beat. In fp64 zero.
    """

    what: str
    name: str
    rank: int
    error: float
    rounding: float = 0.0


@dataclass(frozen=True)
class Verification:
    """The split model against one process with the same weights, data and optimizer.

    Attributes:
        model: the model's name.
        precision: "fp64" or "fp32".
        steps: optimizer updates made before weights and buffers were compared.
        differences: one for each output, gradient (of the first step), weight and buffer.
        notes: what was treated specially, for people.
    """

    model: str
    precision: str
    steps: int
    differences: tuple[Difference, ...]
    notes: tuple[str, ...] = ()

    @property
    def worst(self) -> Difference:
        """The tensor that is furthest off, measured by its tolerance."""
        return max(self.differences, key=lambda d: d.error / self.tolerance(d.what))

    def tolerance(self, what: str) -> float:
        """The error up to which an "output", "gradient", "weight" or "buffer" is rounding."""
        rounding = max((d.rounding for d in self.differences if d.what == what), default=0.0)
        return max(TOLERANCE[self.precision], min(MARGIN * rounding, MOST))

    @property
    def exact(self) -> bool:
        """Whether every difference is rounding."""
        return all(self.of(kind).error <= self.tolerance(kind) for kind in self.kinds)

    @property
    def kinds(self) -> tuple[str, ...]:
        """What was compared."""
        found = {difference.what for difference in self.differences}
        return tuple(kind for kind in ("output", "gradient", "weight", "buffer") if kind in found)

    def of(self, what: str) -> Difference:
        """The worst "output", "gradient", "weight" or "buffer"."""
        return max((d for d in self.differences if d.what == what), key=lambda d: d.error)

    def __repr__(self) -> str:
        worst = self.worst
        verdict = "exact" if self.exact else "NOT EXACT"
        return (
            f"<Verification {self.model} {self.precision}: {verdict}, "
            f"{len(self.differences)} tensors, worst {worst.what} of {worst.name!r} on rank "
            f"{worst.rank}: {worst.error:.1e} (tolerance {self.tolerance(worst.what):.0e})>"
        )

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><td style='text-align:left'>{kind}</td>"
            f"<td>{sum(d.what == kind for d in self.differences)}</td>"
            f"<td>{self.of(kind).error:.1e}</td><td>{self.tolerance(kind):.0e}</td>"
            f"<td style='text-align:left'>{escape(self.of(kind).name)}</td>"
            f"<td>{self.of(kind).rank}</td></tr>"
            for kind in self.kinds
        )
        verdict = "exact &#10003;" if self.exact else "not exact &#10007;"
        said = self.notes
        if any(self.tolerance(kind) > TOLERANCE[self.precision] for kind in self.kinds):
            said = (*said, ROUNDED)
        notes = "".join(f"<br>{escape(note)}" for note in said)
        return (
            f"<div><p><b>{escape(self.model)}</b>, {self.precision}, {self.steps} steps: "
            f"<b>{verdict}</b>{notes}</p>"
            "<table><thead><tr><th>compared</th><th>tensors</th><th>worst relative error</th>"
            f"<th>tolerance</th><th>where</th><th>rank</th></tr></thead>"
            f"<tbody>{rows}</tbody></table></div>"
        )
