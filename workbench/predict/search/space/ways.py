"""What a layer can do, in numbers: by itself, with its inputs, and what that makes of these."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Way:
    """One way to go on, as far as a stage's own values are concerned.

    Attributes:
        choice: index of the layer's choice.
        wishes: number of the wishes of whom it hears under which it is gone.
        state: numbers of its own value and of its inputs that live on, as far as there are any.
        costs: numbers of the cost of the layer, and of all that ends here.
    """

    choice: int
    wishes: int
    state: tuple[int, ...]
    costs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Move:
    """What a layer does, whatever its inputs have seen so far.

    Attributes:
        choice: index of the layer's choice.
        wishes: as of `Way`.
        read: number of the layout in which it reads.
        sums: whether a gradient of summands comes back from it.
        own: number of its own value, where that lives.
        costs: numbers of the cost of the layer, and of its value where nobody reads that.
    """

    choice: int
    wishes: int
    read: int
    sums: bool
    own: tuple[int, ...]
    costs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Met:
    """A value that has been read once more: its number, or that of the cost with which it ends."""

    number: tuple[int, ...]
    cost: tuple[int, ...]
