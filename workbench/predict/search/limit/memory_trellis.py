"""All plans with what they keep: the trellis and the automaton of `keeping.py` together.

A plan's memory is looked at once in the backward pass of each layer: what stays from step to
step, what layers up to this one keep, and what its own backward pass needs. At prices on these
moments, and on both bounds of its time, a cheapest plan is found stage by stage.
"""

from collections.abc import Mapping, Sequence
from functools import cached_property

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
from workbench.predict.search.limit.candidates import Edges, Flags, Load, Prices, Rule, spreads_of
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
from workbench.predict.search.limit.recompute import ONE, Keeping, Moves, seen_of, summed_of
from workbench.predict.search.space.trellis import Floats, Integers, Trellis

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


_TAIL = np.ones(1)


class Laden:
    """All plans in some rounds.

    Args:
        edges: of each stage of the trellis.
        trellis: of all plans, with the costs of `laden_costs.py`.
        keeping: the automaton.
        terms: of the bounds of time.
        resident: bytes that every rank holds whatever the plan.
        rounds: of the plans.
        group_size: of their tail; 1: all at once.
        rough: whether there are so many that `keeping` looks at less than it could.
    """

    def __init__(
        self,
        edges: Sequence[Edges],
        trellis: Trellis,
        keeping: Keeping,
        terms: Terms,
        resident: float,
        rounds: Rounds = "BK",
        group_size: int = 1,
        *,
        rough: bool = False,
    ) -> None:
        self.trellis, self.keeping = trellis, keeping
        self.terms, self.resident = terms, resident
        self.rounds, self.group_size, self.rough = rounds, group_size, rough
        self.pricing = Pricing(terms, rounds, group_size)
        self.edges = edges if group_size == 1 else self._reached(edges)
        self._nexts: dict[tuple[int, int], Integers] = {}

    def cheapest(self, prices: Prices, rules: Sequence[Rule] = ()) -> tuple[float, Load | None]:
        """(its cost, a plan) that is cheapest; `fixed` and `resident` are not in the cost.

        Args:
            prices: of time and memory.
            rules: that it keeps; infinite cost and no plan where none does.
        """
        of_stage: dict[int, list[Rule]] = {}
        for rule in rules:
            of_stage.setdefault(rule.stage, []).append(rule)
        behind, costs = self._behind(prices, of_stage)
        least = float(behind[-1][0, 0])
        return least, self._found(behind[::-1], costs[::-1]) if np.isfinite(least) else None

    def below(self, bound: float, prices: Prices, limit: float) -> list[Edges]:
        """The edges of all plans that fit and could take less than so many seconds.

        Args:
            bound: seconds.
            prices: by which the others are told.
            limit: bytes.
        """
        behind, paid = self._behind(prices, {})
        most = bound - prices.total * (self.resident - limit) - prices.time * self.terms.fixed
        spent, found = np.zeros((1, 1)), []
        rows = zip(self.edges, self.keeping.moves, paid[::-1], behind[-2::-1], strict=True)
        for edges, moves, costs, to_go in rows:
            here = spent[edges.source][:, moves.before] + costs
            following = self._next(edges, moves)
            least = (here + to_go.ravel()[following]).min(axis=1)
            found.append(edges.only(least < most))
            spent = np.full(to_go.shape, np.inf)
            np.minimum.at(spent.reshape(-1), following.ravel(), here.ravel())
        return found

    def _behind(
        self, prices: Prices, rules: Mapping[int, Sequence[Rule]]
    ) -> tuple[list[Floats], list[Floats]]:
        """(least cost from each state to the end, cost of each edge and transition), last first."""
        last: Floats = np.where(self.keeping.ends, 0.0, np.inf)[None, :]
        found, paid = [last], list[Floats]()
        after = np.cumsum(prices.moments[::-1])[::-1]
        padded = np.append(after, 0.0)
        memo: dict[tuple[int, int, bytes], Floats] = {}
        for index in range(len(self.edges) - 1, -1, -1):
            edges, moves = self.edges[index], self.keeping.moves[index]
            reach = after[index] - padded[self.keeping.reaches[index]]
            key = (id(edges), id(moves), np.append(reach, after[index]).tobytes())
            if key not in memo:
                memo[key] = self.pricing.costs(edges, moves, prices, float(after[index]), reach)
            costs = memo[key]
            if index in rules:
                costs = costs.copy()
                for rule in rules[index]:
                    costs[~rule.allowed(edges, moves)] = np.inf
            paid.append(costs)
            total = found[-1].ravel()[self._next(edges, moves)]
            total += costs
            least = np.minimum.reduceat(total, edges.starts, axis=0)
            best = np.full((edges.states, moves.states), np.inf)
            best[edges.present] = np.minimum.reduceat(least, moves.starts, axis=1)
            found.append(best)
        return found, paid

    def _next(self, edges: Edges, moves: Moves) -> Integers:
        """[edges, transitions]: where each leads, as one number."""
        key = (id(edges), id(moves))
        if key not in self._nexts:
            count = int(moves.after_states)
            self._nexts[key] = edges.target[:, None] * count + moves.after[None, :]
        return self._nexts[key]

    def _reached(self, every: Sequence[Edges]) -> list[Edges]:
        """The edges that plans in rounds can have: behind a head of own rows, few are left."""
        here, found = np.ones((1, 1), dtype=bool), []
        known: dict[tuple[int, bytes], Edges] = {}
        for edges, moves in zip(every, self.keeping.moves, strict=True):
            open_ = here[edges.source][:, moves.before]
            open_ &= ~edges.refused(moves.entry, self.group_size)
            mine: Flags = np.any(open_, axis=1)
            key = (id(edges), mine.tobytes())
            if key not in known:
                known[key] = edges.only(mine)
            found.append(known[key])
            here = np.zeros((int(edges.target.max()) + 1, moves.after_states), dtype=bool)
            which, move = np.nonzero(open_)
            here[edges.target[which], moves.after[move]] = True
        return found

    def _found(self, behind: Sequence[Floats], paid: Sequence[Floats]) -> Load:
        state = place = 0
        path, taken = [], []
        for index, edges in enumerate(self.edges):
            moves = self.keeping.moves[index]
            mine = slice(edges.first[state], edges.first[state + 1])
            ours = slice(moves.starts[place], moves.ends[place])
            costs = behind[index + 1][edges.target[mine]][:, moves.after[ours]]
            edge, move = divmod(int((costs + paid[index][mine, ours]).argmin()), costs.shape[1])
            path.append(mine.start + edge)
            taken.append(ours.start + move)
            state, place = int(edges.target[path[-1]]), int(moves.after[taken[-1]])
        return self.load(path, taken)

    def load(self, path: Sequence[int], taken: Sequence[int]) -> Load:
        """The plan of a path, given as one edge and one transition for each stage."""
        costs = np.array([e.costs[edge] for e, edge in zip(self.edges, path, strict=True)])
        moves = Moves.joined(list(zip(self.keeping.moves, taken, strict=True)))
        again, tails = moves.again, moves.tail
        shares = np.where(tails > 0, self.pricing.shares(costs, _TAIL)[:, 0], 1.0)
        rooms = shares[:, None] * costs[:, KEPT]
        kept, there = (rooms * moves.kept).sum(axis=1), (rooms * moves.there).sum(axis=1)
        seen = seen_of(there, moves.left, self.keeping)
        parted = self.pricing.transient(costs, _TAIL)[:, 0]
        here = seen + np.where(tails > 0, parted, costs[:, TRANSIENT])
        lasting = self.pricing.lasting * tails * costs[:, SETTLED]
        settled = costs[:, SETTLED] - lasting
        settled = settled[::-1].cumsum()[::-1] - settled + lasting.sum()
        gathers, more, early = moves.entry == ONE, (0.0, 0.0), 0.0
        if self.group_size > 1:
            ahead, back = self.pricing.more(costs)
            more = float(ahead @ tails), float(back @ tails)
            early = float((costs[:, BACKWARD] + back + again * costs[:, LAYER]) @ tails)
            early *= 1 - 1 / self.group_size
        added = (self.group_size - 1) * float(costs[:, ADDED_UP] @ tails)
        totals, slowed, fixed = costs.sum(axis=0), self.terms.slowed, self.terms.fixed
        levels = np.cumsum(kept + moves.held) + here + settled + moves.stays.sum()
        levels += totals[RESIDENT] + self.resident
        gather = float(costs[:, GATHER] @ gathers) * self.terms.rounds
        sides = totals[LAYER] + totals[FORWARD] + more[0] - gather + totals[UPDATE] + fixed
        whole = sides + totals[BACKWARD] + more[1] + added
        whole += again @ costs[:, LAYER] + moves.repeats @ costs[:, FORWARD]
        whole += slowed * (totals[GRADIENTS] + gather)
        places = tuple(int(e.place[edge]) for e, edge in zip(self.edges, path, strict=True))
        return Load(
            path=places,
            plan=self.trellis.choices(places),
            again=tuple(self.trellis.layers[index].name for index in np.flatnonzero(again)),
            choices=np.array([e.choice[edge] for e, edge in zip(self.edges, path, strict=True)]),
            agains=again.astype(np.int64),
            tails=tails.astype(np.int64),
            rounds=self.rounds,
            whole=float(whole),
            beside=float(sides + early + totals[GRADIENTS]) if self.terms.apart else 0.0,
            levels=levels,
            peak=float((levels + summed_of(there, again, tails, self.keeping) - seen).max()),
        )

    @cached_property
    def spreads(self) -> dict[str, Floats]:
        """For each of `WHATS`, bytes that it decides on at each stage; 0: nothing."""
        return spreads_of(self.edges, self.keeping.moves)
