"""What a model reads: one tensor, or several by the names of forward's parameters."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

_INT64 = 8


@dataclass(frozen=True)
class Input:
    """One tensor that a model reads for each sample.

    Attributes:
        shape: the shape of one sample; () for a number.
        dtype: "float32" (real numbers, in the experiment's precision), "int64" (whole numbers) or
            "bool" (a mask).
        vocabulary: of whole numbers, how many there are, 0 to `vocabulary - 1`: tokens, positions,
            or 2 for a mask of zeros and ones. It makes the numbers "int64"; None: they are not
            whole.
        name: the name of forward's parameter, where the model's inputs have been named; "": the
            model reads one, its first.

    Raises:
        ValueError: a shape with other lengths than whole numbers from 1, an unknown dtype, or whole
            numbers without a vocabulary.
    """

    shape: tuple[int, ...]
    dtype: str = "float32"
    vocabulary: int | None = None
    name: str = ""

    def __post_init__(self) -> None:
        given = self.vocabulary
        if given is not None and (not isinstance(given, int) or given < 1):
            raise ValueError(f"vocabulary is the number of tokens, 1 or more, got {given!r}")
        object.__setattr__(self, "shape", tuple(self.shape))
        if not all(isinstance(length, int) and length > 0 for length in self.shape):
            raise ValueError(
                f"the shape of an input is one sample's without the batch, such as (3, 32, 32), "
                f"got {self.shape}"
            )
        if given is not None and self.dtype == "float32":
            object.__setattr__(self, "dtype", "int64")
        if self.dtype not in ("float32", "int64", "bool"):
            raise ValueError(
                f"the dtype of an input is 'float32' (real numbers in the experiment's precision), "
                f"'int64' or 'bool', got {self.dtype!r}"
            )
        if (self.dtype == "int64") != (given is not None):
            raise ValueError(
                f"an input of whole numbers says how many there are, "
                f"Input({self.shape}, vocabulary=2) for 0 and 1; got dtype {self.dtype!r} and "
                f"vocabulary {given}"
            )

    @property
    def is_real(self) -> bool:
        """Whether it is real numbers."""
        return self.dtype == "float32"

    def itemsize(self, real: int) -> int:
        """The bytes of an element, where a real number has so many."""
        return {"float32": real, "int64": _INT64, "bool": 1}[self.dtype]

    def __str__(self) -> str:
        kind = {"float32": "", "bool": " bool"}.get(self.dtype, f" of {self.vocabulary} tokens")
        return "x".join(map(str, self.shape)) + kind if self.shape else f"a number{kind}"


def sample_bytes(inputs: Sequence[Input], real: int) -> int:
    """The bytes of one sample of all inputs, where a real number has so many."""
    return sum(math.prod(one.shape) * one.itemsize(real) for one in inputs)


def plain_input(inputs: Sequence[Input]) -> Input | None:
    """The one tensor of a model that reads its first parameter, as most do; None: it does not."""
    first, *others = inputs
    return None if others or first.name or first.dtype == "bool" else first


def shown(inputs: Sequence[Input]) -> str:
    """What one sample is, for people: "3x32x32", or "image 3x32x32, mask 16 bool"."""
    return ", ".join(f"{one.name} {one}".lstrip() for one in inputs)
