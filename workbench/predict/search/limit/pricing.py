"""What every choice of a stage costs at given prices, as a product of prices and fixed tables."""

import numpy as np

from workbench.plan.tail import Rounds
from workbench.predict.search.bounds.costs import (
    BACKWARD,
    FORWARD,
    GATHER,
    GRADIENTS,
    IN_ROUNDS,
    LAYER,
    UPDATE,
)
from workbench.predict.search.bounds.relaxation import Terms
from workbench.predict.search.limit.edges import Edges
from workbench.predict.search.limit.loads import Prices
from workbench.predict.search.limit.memory_costs import (
    ADDED_UP,
    APART,
    ARRIVED,
    BESIDE,
    MADE,
    OTHER,
    RESIDENT,
    ROUNDS,
    SETTLED,
    SPACE,
    TRANSIENT,
)
from workbench.predict.search.limit.moves import ONE, Moves
from workbench.predict.search.space.trellis import Floats

KEPT = slice(BESIDE, OTHER + 1)


class Pricing:
    """Of stages of plans in some rounds.

    Args:
        terms: of the bounds of time.
        rounds: of the plans.
        group_size: of their tail; 1: all at once.
    """

    def __init__(self, terms: Terms, rounds: Rounds, group_size: int) -> None:
        self.terms, self.rounds, self.group_size = terms, rounds, group_size
        self.lasting = float(terms.lasting and group_size > 1)  # gradients of the round before
        self._tables: dict[tuple[int, int], Floats] = {}

    def costs(
        self, edges: Edges, moves: Moves, prices: Prices, kept: float, reach: Floats
    ) -> Floats:
        """[edges, transitions]: of a stage, without what follows.

        Args:
            edges: of the stage.
            moves: of its layer.
            prices: of time and memory.
            kept: price of a byte in the backward passes of this layer and all behind it.
            reach: in its own, and in those of the next 0, 1, ... layers of its segment.
        """
        key = (id(edges), id(moves))
        if key not in self._tables:
            self._tables[key] = self._table(edges, moves, len(reach))
        each = np.array([1.0, prices.time, prices.time * prices.mix, kept, prices.total, *reach])
        found: Floats = (each @ self._tables[key]).reshape(len(edges.source), len(moves.before))
        return found

    def shares(self, costs: Floats, tail: Floats) -> Floats:
        """[edges, transitions]: the part of a layer's activations that is there at a time."""
        size = self.group_size
        cut = np.ones(len(costs)) if self.rounds == "B/K" else costs[:, APART]
        found: Floats = 1 - np.outer(cut, tail) * (1 - 1 / size)
        return found

    def transient(self, costs: Floats, tail: Floats) -> Floats:
        """[edges, transitions]: what is there in a layer's backward pass alone."""
        shares = self.shares(costs, tail)
        parted = np.maximum(
            shares * costs[:, SPACE, None], shares * costs[:, ARRIVED, None] + costs[:, MADE, None]
        )
        found: Floats = np.where(tail > 0, parted, costs[:, TRANSIENT, None])
        return found

    def more(self, costs: Floats) -> tuple[Floats, Floats]:
        """Of each edge, what its rounds take more: forward, backward."""
        scheme = IN_ROUNDS.index(self.rounds)
        column = ROUNDS + 2 * (len(IN_ROUNDS) * self.terms.parts.index(self.group_size) + scheme)
        there, back = costs[:, column], costs[:, column + 1]
        if self.rounds == "B":  # of own rows, a rank works on all that it has in one round
            own = costs[:, APART] == 0
            there = np.where(own, np.minimum(there, 0), there)
            back = np.where(own, np.minimum(back, 0), back)
        return there, back

    def _table(self, edges: Edges, moves: Moves, reaches: int) -> Floats:
        """[prices, edges x transitions]: what each price is multiplied by, in the order there."""
        costs, shares = edges.costs, self.shares(edges.costs, moves.tail)
        found = np.zeros((5 + reaches, len(costs), len(moves.before)))
        impossible, plain, mixed, kept, total, *reach = found
        if self.group_size > 1:
            impossible[edges.refused(moves.entry, self.group_size)] = np.inf
        self._seconds(costs, moves, plain, mixed)
        settled = costs[:, SETTLED]
        kept += (costs[:, KEPT] @ moves.kept.T) * shares + moves.held - settled[:, None]
        kept += np.outer(settled, self.lasting * moves.tail)
        total += moves.stays + (costs[:, RESIDENT] + settled)[:, None]
        for left, room in enumerate(reach):
            room += (costs[:, KEPT] @ (moves.there * (moves.left == left)[:, None]).T) * shares
        reach[0] += self.transient(costs, moves.tail)
        return found.reshape(len(found), -1)

    def _seconds(self, costs: Floats, moves: Moves, plain: Floats, mixed: Floats) -> None:
        """Adds seconds at the first bound of time, and by how much the second is above."""
        slowed, size = self.terms.slowed, self.group_size
        again = np.outer(costs[:, LAYER], moves.again) + np.outer(costs[:, FORWARD], moves.repeats)
        sides = costs[:, LAYER] + costs[:, FORWARD] + costs[:, UPDATE]
        plain += (sides + costs[:, BACKWARD] + slowed * costs[:, GRADIENTS])[:, None] + again
        mixed += ((1 - slowed) * costs[:, GRADIENTS] - costs[:, BACKWARD])[:, None] - again
        if size > 1:
            there, back = self.more(costs)
            added = (size - 1) * costs[:, ADDED_UP]
            # Sums begin in the last round: of all others the backward pass is over by then.
            early = 1 - 1 / size
            plain += np.outer(there + back + added, moves.tail)
            mixed += np.outer((early - 1) * back + early * costs[:, BACKWARD] - added, moves.tail)
            mixed += np.outer(costs[:, LAYER], early * moves.again * moves.tail)
            gathers = self.terms.rounds * (moves.entry == ONE)
            plain -= np.outer(costs[:, GATHER], (1 - slowed) * gathers)
            mixed -= np.outer(costs[:, GATHER], slowed * gathers)
