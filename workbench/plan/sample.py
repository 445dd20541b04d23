"""One measured layer shape."""

from typing import ClassVar

from pydantic import Field

from workbench.plan.errors import MachineError
from workbench.plan.value import Value


class Sample(Value):
    """How long one layer shape took at one number of rows."""

    _refusal: ClassVar[type[ValueError]] = MachineError

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
