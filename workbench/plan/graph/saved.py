"""What trying an operation has shown: how it may be cut, and what autograd saves of it.

See `propagation.py` and `saved.py` in `model/tracing/trials`.
"""

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
        of_tokens: whether that is dimension 1 of [rows, tokens, features], and each token is
            computed by itself.
        sliced: (place, dimension) of each input that has no rows, such as positions [tokens,
            features] or a bias of heads, and of which a rank, which has it whole, reads its own
            pieces.
    """

    inputs: tuple[tuple[int, ...], ...]
    output: tuple[int, ...]
    pieces: int
    scaled: tuple[int, ...] = ()
    drawn: int = 0
    of_tokens: bool = False
    sliced: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class Saved:
    """What an operation saves, as it did so when its model was traced.

    Attributes:
        inputs: the places of the saved ones among the layer's inputs.
        output: whether its output is saved.
        view: whether its output has the memory of its first input.
        words: further elements of the output's type, for each element of the output.
        bytes: bytes of further tensors of other types, for each element of the output.
        forward: elements that are alive beside all this at the most while it runs, for each element
            of the output, where it is not torch's own.
        backward: the same while its backward pass runs, beside the gradients that it gives.
    """

    inputs: tuple[int, ...] = ()
    output: bool = False
    view: bool = False
    words: float = 0.0
    bytes: float = 0.0
    forward: float = 0.0
    backward: float = 0.0
