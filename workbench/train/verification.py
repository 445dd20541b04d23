"""What `verify` found: the split model against the unsplit one."""

from dataclasses import dataclass
from html import escape

TOLERANCE = {"fp64": 1e-10, "fp32": 1e-4}


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
    """

    what: str
    name: str
    rank: int
    error: float


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
        """The tensor that is furthest off."""
        return max(self.differences, key=lambda d: d.error if d.error == d.error else float("inf"))

    @property
    def tolerance(self) -> float:
        """The error up to which the split counts as exact."""
        return TOLERANCE[self.precision]

    @property
    def exact(self) -> bool:
        """Whether every difference is rounding."""
        return self.worst.error <= self.tolerance

    def of(self, what: str) -> Difference:
        """The worst "output", "gradient", "weight" or "buffer"."""
        return max((d for d in self.differences if d.what == what), key=lambda d: d.error)

    def __repr__(self) -> str:
        worst = self.worst
        verdict = "exact" if self.exact else "NOT EXACT"
        return (
            f"<Verification {self.model} {self.precision}: {verdict}, "
            f"{len(self.differences)} tensors, worst {worst.what} of {worst.name!r} on rank "
            f"{worst.rank}: {worst.error:.1e} (tolerance {self.tolerance:.0e})>"
        )

    def _repr_html_(self) -> str:
        kinds = [k for k in ("output", "gradient", "weight", "buffer") if self._has(k)]
        rows = "".join(
            f"<tr><td style='text-align:left'>{kind}</td>"
            f"<td>{sum(d.what == kind for d in self.differences)}</td>"
            f"<td>{self.of(kind).error:.1e}</td>"
            f"<td style='text-align:left'>{escape(self.of(kind).name)}</td>"
            f"<td>{self.of(kind).rank}</td></tr>"
            for kind in kinds
        )
        verdict = "exact &#10003;" if self.exact else "not exact &#10007;"
        notes = "".join(f"<br>{escape(note)}" for note in self.notes)
        return (
            f"<div><p><b>{escape(self.model)}</b>, {self.precision}, {self.steps} steps: "
            f"<b>{verdict}</b> (tolerance {self.tolerance:.0e}){notes}</p>"
            "<table><thead><tr><th>compared</th><th>tensors</th><th>worst relative error</th>"
            f"<th>where</th><th>rank</th></tr></thead><tbody>{rows}</tbody></table></div>"
        )

    def _has(self, what: str) -> bool:
        return any(d.what == what for d in self.differences)
