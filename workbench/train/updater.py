"""One rank's optimizer: which parameters it moves, and what it remembers of them."""

from collections.abc import Callable, Collection, Iterator, Mapping

from torch import Tensor, nn

from workbench.comm.owned import Owned
from workbench.layers.cut_model import CutModel
from workbench.plan.experiment import Optimizer
from workbench.train.optimizer import build_optimizer, load_state, state_tensors


class Updater:
    """Moves this rank's parameters by their gradients.

    Args:
        value: the experiment's optimizer.
        model: this rank's part.
        held: what it moves, by name: the parameters of `model`, or parts of them.
    """

    def __init__(self, value: Optimizer, model: CutModel, held: Mapping[str, nn.Parameter]) -> None:
        self.value, self.model, self.held = value, model, held
        self.optimizer = build_optimizer(value, held.values())

    def step(self) -> None:
        """Moves every parameter that has a gradient; all ranks call it."""
        self.optimizer.step()

    def state(self, wanted: Collection[str]) -> dict[str, Tensor]:
        """What is remembered of this rank's pieces, by entry; all ranks call it.

        Args:
            wanted: the entries that must be there; there may be others.
        """
        return state_tensors(self.optimizer, self.value, self.held)

    def load(self, read: Callable[[str, str], Tensor]) -> None:
        """Puts back what was remembered.

        Args:
            read: (state, name) -> this rank's piece of that state.
        """
        load_state(self.optimizer, self.value, self.held, read)

    @property
    def owned(self) -> Mapping[tuple[str, ...], Owned]:
        """Where gradients are summed by who moves them, by the names of those that travel together.

        All others are summed on every rank.
        """
        return {}

    def tensors(self) -> Iterator[Tensor]:
        """What is remembered on this rank, for the account of memory."""
        for held in self.optimizer.state.values():
            yield from (value for value in held.values() if isinstance(value, Tensor))
