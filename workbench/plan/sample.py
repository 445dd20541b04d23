"""One measured layer shape."""

from typing import Self

from pydantic import Field

from workbench.plan.value import MachineValue
from workbench.plan.work import Work


class Sample(MachineValue):
    """How long one layer shape took at one number of rows."""

    kind: str
    key: str
    """As in `Work`."""
    precision: str
    rows: int = Field(ge=0)
    flops: float = Field(ge=0)
    bytes: float = Field(ge=0)
    forward_s: float = Field(ge=0)
    backward_s: float = Field(ge=0)
    error: float = Field(default=0.0, ge=0)
    """Relative half width of the 95 % confidence interval of forward and backward together."""

    @classmethod
    def of(cls, work: Work, forward_s: float, backward_s: float, error: float = 0.0) -> Self:
        """How long this work took."""
        return cls(
            kind=work.kind,
            key=work.key,
            precision=work.precision,
            rows=work.rows,
            flops=work.flops,
            bytes=work.bytes,
            forward_s=forward_s,
            backward_s=backward_s,
            error=error,
        )
