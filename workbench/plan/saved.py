"""What autograd saves of one operation, from its forward pass to its backward pass."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Saved:
    """What an operation saves, as it did so when its model was traced.

    Attributes:
        inputs: the places of the saved ones among the layer's inputs.
        output: whether its output is saved.
        view: whether its output has the memory of its first input.
        words: further elements of the output's type, for each element of the output.
        bytes: bytes of further tensors of other types, for each element of the output.
    """

    inputs: tuple[int, ...] = ()
    output: bool = False
    view: bool = False
    words: float = 0.0
    bytes: float = 0.0
