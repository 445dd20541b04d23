"""Codecs as values: how gradients are compressed, and into how many bytes."""

from math import ceil
from typing import Annotated, Any, Literal, Self, cast, get_args

from pydantic import BeforeValidator, Field, model_serializer, model_validator

from workbench.plan.value import Value

CodecName = Literal["fp16", "bf16", "bf16_truncated", "int8", "int4", "top_k"]

_SAID: dict[CodecName, str] = {
    "fp16": "fp16",
    "bf16": "bf16, rounded to nearest",
    "bf16_truncated": "bf16, truncated",
    "int8": "int8 with a scale for every {chunk} values",
    "int4": "int4 with a scale for every {chunk} values",
    "top_k": "the largest {fraction:g} of their values",
}
_OF: dict[str, tuple[CodecName, ...]] = {"chunk": ("int8", "int4"), "fraction": ("top_k",)}
_SCALE_BYTES = _INDEX_BYTES = _VALUE_BYTES = 4


class Codec(Value):
    """A compression of the values that ranks send. Inexact.

        fp16             rounded to nearest even, 5 bits of exponent; larger magnitudes than 65504
                         are an error
        bf16             rounded to nearest even, 8 bits of exponent
        bf16_truncated   the same with the low 16 bits cut off: biased toward zero
        int8, int4       whole multiples of a scale, which is the largest magnitude of each chunk
                         divided by 127 or 7
        top_k            the largest magnitudes as fp32, each with its index

    Source: "bf16_truncated" and "int8" are T and Q of Pipe-SGD (Li et al. 2018, arXiv:1811.03619);
    the others are ours.
    """

    name: CodecName
    error_feedback: bool = False
    """Keep on each rank what its encodings lost, and add it to what they encode next time.

    Source: Seide et al. 2014 (1-bit SGD, Interspeech); not in Pipe-SGD."""
    chunk: int = Field(default=1024, ge=2, multiple_of=2)
    """The number of values with a scale of their own, for "int8" and "int4"."""
    fraction: float = Field(default=0.01, gt=0, le=1)
    """The fraction of the values that "top_k" sends; of any piece at least one."""

    @model_validator(mode="after")
    def _only_what_it_has(self) -> Self:
        for field, names in _OF.items():
            if field in self.model_fields_set and self.name not in names:
                valid = " and ".join(map(repr, names))
                raise ValueError(f"{field} is for {valid}, {self.name!r} has none")
        return self

    @property
    def inexact(self) -> str:
        """The format of what is sent, in words."""
        said = _SAID[self.name].format(chunk=self.chunk, fraction=self.fraction)
        return f"{said}, with error feedback" if self.error_feedback else said

    def kept(self, length: int) -> int:
        """How many of `length` values "top_k" sends."""
        return min(length, max(1, int(self.fraction * length)))

    def encoded_bytes(self, length: int) -> int:
        """The bytes of `length` values that are encoded together."""
        match self.name:
            case "int8":
                return length + _SCALE_BYTES * ceil(length / self.chunk)
            case "int4":
                return ceil(length / 2) + _SCALE_BYTES * ceil(length / self.chunk)
            case "top_k":
                return (_VALUE_BYTES + _INDEX_BYTES) * self.kept(length)
            case _:
                return 2 * length

    @model_serializer
    def _as_people_write_it(self) -> str | dict[str, Any]:
        """The name alone where all else is the default."""
        entries: dict[str, Any] = {"name": self.name, "error_feedback": self.error_feedback}
        entries |= {field: getattr(self, field) for field in _OF if self.name in _OF[field]}
        default = Codec(name=self.name)
        said = {key: value for key, value in entries.items() if value != getattr(default, key)}
        return {"name": self.name, **said} if said else self.name


def as_codec(value: Any) -> Any:
    """Converts a codec's name to the codec; leaves everything else alone.

    Raises:
        ValueError: there is no such codec.
    """
    if not isinstance(value, str):
        return value
    if value not in get_args(CodecName):
        names = ", ".join(map(repr, get_args(CodecName)))
        raise ValueError(f"no codec {value!r}; there are {names}")
    return Codec(name=cast(CodecName, value))


NamedCodec = Annotated[Codec | None, BeforeValidator(as_codec)]
"""A field that takes a codec, its name, or None: values are sent as they are."""
