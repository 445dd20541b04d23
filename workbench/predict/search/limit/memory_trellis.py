"""All plans with what they hold: the trellis combined with the automaton of `recompute.py`.

A plan's memory is priced once in the backward pass of each layer: what stays from step to step,
what layers up to this one save, and what its own backward pass needs. At prices on these moments,
and on both bounds of its time, a cheapest plan is found stage by stage.
"""

from collections.abc import Mapping, Sequence
from functools import cached_property

import numpy as np

from workbench.plan.placement.rounds import Rounds
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
from workbench.predict.search.limit.candidates import Candidate, Prices, Rule, spreads_of
from workbench.predict.search.limit.memory_costs import (
    ADDED_UP,
    APART,
    ARRIVED,
    BESIDE,
    ENTRIES,
    MADE,
    OTHER,
    OVER,
    PARTED,
    RESIDENT,
    ROUNDS,
    SETTLED,
    SPACE,
    TRANSIENT,
)
from workbench.predict.search.limit.recompute import (
    NONE,
    ONE,
    RecomputeAutomaton,
    Transitions,
    priced_bytes,
    segment_bytes,
)
from workbench.predict.search.space.trellis import Flags, Floats, Integers, Stage, Trellis

KEPT = slice(BESIDE, OTHER + 1)


class Pricing:
    """The prices of stages, for plans with given rounds.

    Args:
        terms: the terms that the bounds of time have in common.
        rounds: the rounds of the plans' tail.
        group_size: the group size of their tail; 1: all rows at once.
    """

    def __init__(self, terms: Terms, rounds: Rounds, group_size: int) -> None:
        self.terms, self.rounds, self.group_size = terms, rounds, group_size
        self.lasting = float(terms.lasting and group_size > 1)  # gradients of the round before
        self._tables: dict[tuple[int, int], Floats] = {}

    def costs(
        self, edges: Stage, transitions: Transitions, prices: Prices, kept: float, reach: Floats
    ) -> Floats:
        """The cost of each edge and transition of a stage [edges, transitions].

        Args:
            edges: the stage's edges.
            transitions: the transitions of the stage's layer.
            prices: the prices of time and memory.
            kept: the price of a byte in the backward passes of this layer and all after it.
            reach: the price of a byte in its own backward pass, then also in those of the next 0,
                1, ... layers of its segment [1 + reach].
        """
        key = (id(edges), id(transitions))
        if key not in self._tables:
            self._tables[key] = self._table(edges, transitions, len(reach))
        each = np.array([1.0, prices.time, prices.time * prices.mix, kept, prices.total, *reach])
        found: Floats = (each @ self._tables[key]).reshape(
            len(edges.source), len(transitions.before)
        )
        return found

    def shares(self, costs: Floats, tail: Floats) -> Floats:
        """The fraction of a layer's activations that is alive at a time [edges, transitions]."""
        size = self.group_size
        cut = np.ones(len(costs)) if self.rounds == "B/K" else costs[:, APART]
        found: Floats = 1 - np.outer(cut, tail) * (1 - 1 / size)
        return found

    def transient(self, costs: Floats, tail: Floats) -> Floats:
        """The bytes that are alive in a layer's backward pass alone [edges, transitions]."""
        shares = self.shares(costs, tail)
        parted = np.maximum(
            shares * costs[:, SPACE, None], shares * costs[:, ARRIVED, None] + costs[:, MADE, None]
        )
        found: Floats = np.where(tail > 0, parted, costs[:, TRANSIENT, None])
        return found

    def more(self, costs: Floats) -> tuple[Floats, Floats]:
        """The further seconds of each edge's rounds [edges]: (forward, backward)."""
        scheme = IN_ROUNDS.index(self.rounds)
        column = ROUNDS + 2 * (len(IN_ROUNDS) * self.terms.parts.index(self.group_size) + scheme)
        there, back = costs[:, column], costs[:, column + 1]
        if self.rounds == "B":  # of own rows, a rank works on all that it has in one round
            own = costs[:, APART] == 0
            there = np.where(own, np.minimum(there, 0), there)
            back = np.where(own, np.minimum(back, 0), back)
        return there, back

    def _table(self, edges: Stage, transitions: Transitions, reaches: int) -> Floats:
        """The amount that each price is multiplied by [prices, edges x transitions]."""
        costs, shares = edges.costs, self.shares(edges.costs, transitions.tail)
        found = np.zeros((5 + reaches, len(costs), len(transitions.before)))
        impossible, plain, mixed, kept, total, *reach = found
        if self.group_size > 1:
            impossible[_refused(edges, transitions.entry, self.group_size)] = np.inf
        self._seconds(costs, transitions, plain, mixed)
        settled = costs[:, SETTLED]
        kept += (costs[:, KEPT] @ transitions.kept.T) * shares + transitions.held - settled[:, None]
        kept += np.outer(settled, self.lasting * transitions.tail)
        total += transitions.stays + (costs[:, RESIDENT] + settled)[:, None]
        for left, room in enumerate(reach):
            room += (
                costs[:, KEPT] @ (transitions.there * (transitions.left == left)[:, None]).T
            ) * shares
        reach[0] += self.transient(costs, transitions.tail)
        return found.reshape(len(found), -1)

    def _seconds(
        self, costs: Floats, transitions: Transitions, plain: Floats, mixed: Floats
    ) -> None:
        """Adds the seconds of the first bound, and by how much the second one exceeds it."""
        slowed, size = self.terms.slowed, self.group_size
        recompute = np.outer(costs[:, LAYER], transitions.recompute) + np.outer(
            costs[:, FORWARD], transitions.repeats
        )
        sides = costs[:, LAYER] + costs[:, FORWARD] + costs[:, UPDATE]
        plain += (sides + costs[:, BACKWARD] + slowed * costs[:, GRADIENTS])[:, None] + recompute
        mixed += ((1 - slowed) * costs[:, GRADIENTS] - costs[:, BACKWARD])[:, None] - recompute
        if size > 1:
            there, back = self.more(costs)
            added = (size - 1) * costs[:, ADDED_UP]
            # Sums begin in the last round: of all others the backward pass is over by then.
            early = 1 - 1 / size
            plain += np.outer(there + back + added, transitions.tail)
            mixed += np.outer(
                (early - 1) * back + early * costs[:, BACKWARD] - added, transitions.tail
            )
            mixed += np.outer(costs[:, LAYER], early * transitions.recompute * transitions.tail)
            begins = transitions.entry == ONE
            plain -= np.outer(costs[:, PARTED], begins)
            mixed += np.outer((1 - early) * costs[:, PARTED], begins)
            gathers = self.terms.rounds * begins
            plain -= np.outer(costs[:, GATHER], (1 - slowed) * gathers)
            mixed -= np.outer(costs[:, GATHER], slowed * gathers)


_TAIL = np.ones(1)


class MemoryTrellis:
    """All plans with given rounds.

    Args:
        edges: the edges of each stage of the trellis.
        trellis: the trellis of all plans, with the costs of `memory_costs.py`.
        automaton: the automaton of what each plan saves.
        terms: the terms that the bounds of time have in common.
        resident: the bytes that every rank holds with any plan.
        rounds: the rounds of the plans' tail.
        group_size: the group size of their tail; 1: all rows at once.
        coarse: whether `automaton` looks ahead less than it could, since there are so many plans.
    """

    def __init__(
        self,
        edges: Sequence[Stage],
        trellis: Trellis,
        automaton: RecomputeAutomaton,
        terms: Terms,
        resident: float,
        rounds: Rounds = "BK",
        group_size: int = 1,
        *,
        coarse: bool = False,
    ) -> None:
        self.trellis, self.automaton = trellis, automaton
        self.terms, self.resident = terms, resident
        self.rounds, self.group_size, self.coarse = rounds, group_size, coarse
        self.pricing = Pricing(terms, rounds, group_size)
        self.edges = edges if group_size == 1 else self._reached(edges)
        self._nexts: dict[tuple[int, int], Integers] = {}

    def cheapest(
        self, prices: Prices, rules: Sequence[Rule] = ()
    ) -> tuple[float, Candidate | None]:
        """(its cost, a plan) with the least cost, which excludes `fixed` and `resident`.

        Args:
            prices: the prices of time and memory.
            rules: the rules that it must keep; infinite cost and no plan where none does.
        """
        of_stage: dict[int, list[Rule]] = {}
        for rule in rules:
            of_stage.setdefault(rule.stage, []).append(rule)
        behind, costs = self._behind(prices, of_stage)
        least = float(behind[-1][0, 0])
        return least, self._found(behind[::-1], costs[::-1]) if np.isfinite(least) else None

    def below(self, bound: float, prices: Prices, limit: float) -> list[Stage]:
        """The edges of all plans that fit and could take less than so many seconds.

        Args:
            bound: the time, in seconds.
            prices: the prices by which plans are compared.
            limit: the memory limit, in bytes.
        """
        behind, paid = self._behind(prices, {})
        most = bound - prices.total * (self.resident - limit) - prices.time * self.terms.fixed
        spent, found = np.zeros((1, 1)), []
        rows = zip(self.edges, self.automaton.transitions, paid[::-1], behind[-2::-1], strict=True)
        for edges, transitions, costs, to_go in rows:
            here = spent[edges.source][:, transitions.before] + costs
            leads_to = self._next(edges, transitions)
            least = (here + to_go.ravel()[leads_to]).min(axis=1)
            found.append(edges.only(least < most))
            spent = np.full(to_go.shape, np.inf)
            np.minimum.at(spent.reshape(-1), leads_to.ravel(), here.ravel())
        return found

    def _behind(
        self, prices: Prices, rules: Mapping[int, Sequence[Rule]]
    ) -> tuple[list[Floats], list[Floats]]:
        """(least cost from each state to the end, cost of each edge and transition), last first."""
        last: Floats = np.where(self.automaton.ends, 0.0, np.inf)[None, :]
        found, paid = [last], list[Floats]()
        after = np.cumsum(prices.moments[::-1])[::-1]
        padded = np.append(after, 0.0)
        memo: dict[tuple[int, int, bytes], Floats] = {}
        for index in range(len(self.edges) - 1, -1, -1):
            edges, transitions = self.edges[index], self.automaton.transitions[index]
            reach = after[index] - padded[self.automaton.reaches[index]]
            key = (id(edges), id(transitions), np.append(reach, after[index]).tobytes())
            if key not in memo:
                memo[key] = self.pricing.costs(
                    edges, transitions, prices, float(after[index]), reach
                )
            costs = memo[key]
            if index in rules:
                costs = costs.copy()
                for rule in rules[index]:
                    costs[~rule.allowed(edges, transitions)] = np.inf
            paid.append(costs)
            total = found[-1].ravel()[self._next(edges, transitions)]
            total += costs
            least = np.minimum.reduceat(total, edges.starts, axis=0)
            best = np.full((edges.states, transitions.states), np.inf)
            best[edges.left] = np.minimum.reduceat(least, transitions.starts, axis=1)
            found.append(best)
        return found, paid

    def _next(self, edges: Stage, transitions: Transitions) -> Integers:
        """The number of the state that each leads to [edges, transitions]."""
        key = (id(edges), id(transitions))
        if key not in self._nexts:
            count = int(transitions.after_states)
            self._nexts[key] = edges.target[:, None] * count + transitions.after[None, :]
        return self._nexts[key]

    def _reached(self, every: Sequence[Stage]) -> list[Stage]:
        """The edges that plans in rounds can have: after a head of own rows, few are left."""
        here, found = np.ones((1, 1), dtype=bool), []
        known: dict[tuple[int, bytes], Stage] = {}
        after = [*(edges.states for edges in every[1:]), 1]
        for edges, transitions, states in zip(
            every, self.automaton.transitions, after, strict=True
        ):
            open_ = here[edges.source][:, transitions.before]
            open_ &= ~_refused(edges, transitions.entry, self.group_size)
            mine: Flags = np.any(open_, axis=1)
            key = (id(edges), mine.tobytes())
            if key not in known:
                known[key] = edges.only(mine)
            found.append(known[key])
            here = np.zeros((states, transitions.after_states), dtype=bool)
            which, move = np.nonzero(open_)
            here[edges.target[which], transitions.after[move]] = True
        return found

    def _found(self, behind: Sequence[Floats], paid: Sequence[Floats]) -> Candidate:
        state = place = 0
        path, taken = [], []
        for index, edges in enumerate(self.edges):
            transitions = self.automaton.transitions[index]
            mine = slice(edges.first[state], edges.first[state + 1])
            ours = slice(transitions.starts[place], transitions.ends[place])
            costs = behind[index + 1][edges.target[mine]][:, transitions.after[ours]]
            edge, move = divmod(int((costs + paid[index][mine, ours]).argmin()), costs.shape[1])
            path.append(mine.start + edge)
            taken.append(ours.start + move)
            state, place = int(edges.target[path[-1]]), int(transitions.after[taken[-1]])
        return self.candidate(path, taken)

    def candidate(self, path: Sequence[int], taken: Sequence[int]) -> Candidate:
        """The plan of a path, which is given as one edge and one transition for each stage."""
        costs = np.array([e.costs[edge] for e, edge in zip(self.edges, path, strict=True)])
        transitions = Transitions.joined(zip(self.automaton.transitions, taken, strict=True))
        recompute, tails = transitions.recompute, transitions.tail
        shares = np.where(tails > 0, self.pricing.shares(costs, _TAIL)[:, 0], 1.0)
        rooms = shares[:, None] * costs[:, KEPT]
        kept, there = (
            (rooms * transitions.kept).sum(axis=1),
            (rooms * transitions.there).sum(axis=1),
        )
        seen = priced_bytes(there, transitions.left, self.automaton)
        parted = self.pricing.transient(costs, _TAIL)[:, 0]
        here = seen + np.where(tails > 0, parted, costs[:, TRANSIENT])
        lasting = self.pricing.lasting * tails * costs[:, SETTLED]
        settled = costs[:, SETTLED] - lasting
        settled = settled[::-1].cumsum()[::-1] - settled + lasting.sum()
        gathers, more, early = transitions.entry == ONE, (0.0, 0.0), 0.0
        if self.group_size > 1:
            ahead, back = self.pricing.more(costs)
            back = back - costs[:, PARTED] * gathers
            more = float(ahead @ tails), float(back @ tails)
            early = float((costs[:, BACKWARD] + back + recompute * costs[:, LAYER]) @ tails)
            early *= 1 - 1 / self.group_size
        added = (self.group_size - 1) * float(costs[:, ADDED_UP] @ tails)
        totals, slowed, fixed = costs.sum(axis=0), self.terms.slowed, self.terms.fixed
        levels = np.cumsum(kept + transitions.held) + here + settled + transitions.stays.sum()
        levels += totals[RESIDENT] + self.resident
        gather = float(costs[:, GATHER] @ gathers) * self.terms.rounds
        sides = totals[LAYER] + totals[FORWARD] + more[0] - gather + totals[UPDATE] + fixed
        whole = sides + totals[BACKWARD] + more[1] + added
        whole += recompute @ costs[:, LAYER] + transitions.repeats @ costs[:, FORWARD]
        whole += slowed * (totals[GRADIENTS] + gather)
        places = tuple(int(e.place[edge]) for e, edge in zip(self.edges, path, strict=True))
        return Candidate(
            path=places,
            plan=self.trellis.choices(places),
            recomputed=tuple(
                self.trellis.layers[index].name for index in np.flatnonzero(recompute)
            ),
            choices=np.array([e.choice[edge] for e, edge in zip(self.edges, path, strict=True)]),
            recomputes=recompute.astype(np.int64),
            tails=tails.astype(np.int64),
            rounds=self.rounds,
            serial_s=float(whole),
            overlapped_s=float(sides + early + totals[GRADIENTS]) if self.terms.apart else 0.0,
            levels=levels,
            peak=float(
                (levels + segment_bytes(there, recompute, tails, self.automaton) - seen).max()
            ),
        )

    @cached_property
    def spreads(self) -> dict[str, Floats]:
        """The bytes that each of `DECISIONS` decides on at each stage; 0: none [stages]."""
        return spreads_of(self.edges, self.automaton.transitions)


def _refused(edges: Stage, entry: Integers, parts: int) -> Flags:
    """Where a tail of groups of `parts` ranks cannot make a conversion [edges, transitions]."""
    entries, over = edges.costs[:, ENTRIES, None], edges.costs[:, OVER, None]
    one = (entries == 1) & (over == parts)
    refused: Flags = ((entry == NONE) & (entries > 0)) | ((entry == ONE) & ~one)
    return refused
