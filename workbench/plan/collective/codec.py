"""Codecs as values: how gradients are compressed, and into how many bytes."""

from collections.abc import Mapping
from math import ceil
from typing import Annotated, Any, Literal, Self, cast, get_args

from pydantic import (
    BeforeValidator,
    Discriminator,
    Field,
    Tag,
    field_validator,
    model_serializer,
    model_validator,
)

from workbench.plan.extension.extension import extension_of, name_of, named
from workbench.plan.extension.user_object import Own, OwnObjectError
from workbench.plan.io.errors import alike
from workbench.plan.io.value import Value

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
    """Which one it is; `codec="int8"` is this codec with all defaults."""
    error_feedback: bool = False
    """Keep on each rank what its encodings lost, and add it to what they encode next time.

    Source: Seide et al. 2014 (1-bit SGD, Interspeech); not in Pipe-SGD."""
    chunk: int = Field(default=1024, ge=2, multiple_of=2)
    """The number of values with a scale of their own, for "int8" and "int4"."""
    fraction: float = Field(default=0.01, gt=0, le=1)
    """The fraction of the values that "top_k" sends; of any piece at least one."""

    @field_validator("name", mode="before")
    @classmethod
    def _in_any_case(cls, given: Any) -> Any:
        return (alike(given, get_args(CodecName)) or given) if isinstance(given, str) else given

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


class OwnCodec(Value):
    """A codec of a person's own: an object that extends `wb.extend.Codec`. Inexact."""

    own: Own
    """The codec: an object, its class, "module:attribute", or the name under which an installed
    package offers it."""
    error_feedback: bool
    """As for `Codec`; what the codec's own attribute says, unless it is given."""

    @model_validator(mode="before")
    @classmethod
    def _keeps_what_it_says(cls, fields: Any) -> Any:
        if not isinstance(fields, Mapping) or "error_feedback" in fields or "own" not in fields:
            return fields
        own = named(fields["own"], "codecs", ())
        says = isinstance(own, Own) and bool(extension_of(own, "codecs").error_feedback)
        return {**fields, "own": own, "error_feedback": says}

    @field_validator("own", mode="before")
    @classmethod
    def _is_a_codec(cls, given: Any) -> Any:
        return named(given, "codecs", ())

    @property
    def name(self) -> str:
        """What it is called in tables and errors."""
        return name_of(self.own)

    @property
    def inexact(self) -> str:
        """The format of what is sent, in words."""
        said = getattr(self.own.held, "inexact", "") or self.name
        return f"{said}, with error feedback" if self.error_feedback else said

    def encoded_bytes(self, length: int) -> int:
        """The bytes of `length` values that are encoded together; of none, none."""
        if length == 0:
            return 0
        size = extension_of(self.own, "codecs").encoded_bytes(length)
        if type(size) is not int or size < 0:
            raise OwnObjectError(
                f"codec {self.name!r}: encoded_bytes({length}) must be a whole number >= 0, "
                f"got {size!r}"
            )
        return size


AnyCodec = Codec | OwnCodec
"""A built-in codec, or one of a person's own."""


def as_codec(value: Any) -> Any:
    """Converts a codec's name, or a codec of a person's own, to the value; leaves values alone."""
    if value is None or isinstance(value, AnyCodec | Mapping):
        return value
    found = named(value, "codecs", get_args(CodecName), "codec")
    if isinstance(found, Own):
        return OwnCodec.model_validate({"own": found})
    return Codec(name=cast(CodecName, found))


def _whose(value: Any) -> str:
    own = isinstance(value, OwnCodec) or (isinstance(value, Mapping) and "own" in value)
    return "own" if own else "built-in"


_Either = Annotated[
    Annotated[Codec, Tag("built-in")] | Annotated[OwnCodec, Tag("own")], Discriminator(_whose)
]
NamedCodec = Annotated[_Either | None, BeforeValidator(as_codec)]
"""A field that takes a codec, its name, one of a person's own, or None: values are sent as they
are."""
