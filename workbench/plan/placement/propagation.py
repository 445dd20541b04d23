"""How an operation may be cut, as trying it has shown (`model/tracing/trials/propagation.py`)."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Propagation:
    """A way in which an operation may be cut: piece by piece, it computes the same.

    A tensor is cut along one dimension, counted with the batch, which may consist of several equal
    blocks that are cut alike (`placement.Shard`). Cut into `pieces` equal pieces, piece i of the
    output depends on the pieces i of the inputs that are cut, and on nothing else of them.

    Attributes:
        inputs: of each of the layer's inputs (dimension, blocks); (): it is read whole.
        output: (dimension, blocks) of the output.
        pieces: the number of pieces.
        scaled: the places of those numbers among the arguments that count what is cut: of fewer
            pieces they are less, as the 12 in `x.view(batch, tokens, 12, 64)`.
        drawn: the dimension along which the random tensors that it draws are cut; 0: it draws none.
    """

    inputs: tuple[tuple[int, ...], ...]
    output: tuple[int, ...]
    pieces: int
    scaled: tuple[int, ...] = ()
    drawn: int = 0
