"""One measured layer shape."""

from pydantic import Field

from workbench.plan.value import MachineValue


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
