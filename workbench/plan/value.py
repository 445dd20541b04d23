"""The base of the values that an experiment is made of."""

from typing import Any, ClassVar, Self

from pydantic import BaseModel as PydanticModel
from pydantic import ConfigDict

from workbench.plan.errors import ExperimentError, MachineError, readable


class Value(PydanticModel):
    """A frozen value that refuses unknown fields and wrong types, with one readable error."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=False, use_attribute_docstrings=True
    )

    _refusal: ClassVar[type[ValueError]] = ExperimentError

    def __init__(self, **fields: Any) -> None:
        with readable(self._refusal, type(self).__name__):
            super().__init__(**fields)

    def replace(self, **fields: Any) -> Self:
        """A copy with other values in some fields, validated."""
        current = {name: getattr(self, name) for name in type(self).model_fields}
        return type(self)(**{**current, **fields})


class MachineValue(Value):
    """A value that a machine is made of."""

    _refusal: ClassVar[type[ValueError]] = MachineError
