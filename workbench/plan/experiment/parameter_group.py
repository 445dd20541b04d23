"""Parameters with options of their own, as torch's parameter groups."""

from fnmatch import fnmatchcase
from typing import Any, Self

from pydantic import ConfigDict, Field, model_validator

from workbench.plan.value import Value


class ParameterGroup(Value):
    """Parameters with options of their own, by name or by their number of dimensions.

    What is given must hold: with both, a parameter matches by its name and has few enough
    dimensions. The first group that matches a parameter has it.

        wb.AdamW(1e-3, groups=[wb.ParameterGroup(dims=1, weight_decay=0.0)])   # biases and norms
        wb.SGD(0.1, groups=[wb.ParameterGroup("head.*", "*.norm.*", lr=0.01)])

    All further keywords are options of the optimizer, and override its own.

    Raises:
        ExperimentError: neither patterns nor dims are given, or no option.
    """

    model_config = ConfigDict(extra="allow")

    patterns: tuple[str, ...] = ()
    """Names of parameters, in which `*`, `?` and `[...]` are those of `fnmatch`; given one after
    another, without a name."""
    dims: int | None = Field(default=None, ge=0)
    """The most dimensions that a parameter of the group has."""

    def __init__(self, /, *patterns: str, **fields: Any) -> None:
        if patterns:
            fields["patterns"] = patterns
        super().__init__(**fields)

    @model_validator(mode="before")
    @classmethod
    def _one_pattern_or_several(cls, fields: Any) -> Any:
        if isinstance(fields, dict) and isinstance(fields.get("patterns"), str):
            return {**fields, "patterns": (fields["patterns"],)}
        return fields

    @model_validator(mode="after")
    def _is_of_something(self) -> Self:
        if not self.patterns and self.dims is None:
            raise ValueError("a group needs patterns of names, as '*.bias', or dims")
        if not self.options:
            raise ValueError(f"{self} has no options of its own, such as weight_decay or lr")
        return self

    @property
    def options(self) -> dict[str, Any]:
        """The optimizer's options that are others for this group."""
        return dict(self.model_extra or {})

    def matches(self, name: str, dims: int) -> bool:
        """Whether a parameter of this name, with so many dimensions, is one of these."""
        named = not self.patterns or any(fnmatchcase(name, each) for each in self.patterns)
        return named and (self.dims is None or dims <= self.dims)

    def __str__(self) -> str:
        said = [repr(pattern) for pattern in self.patterns]
        said += [] if self.dims is None else [f"dims={self.dims}"]
        return f"ParameterGroup({', '.join(said)})"
