"""Algorithms without data: what they exchange, and what does not fit together."""

import pytest
import torch

from tests.own_sums import Star, Tree
from workbench.comm.algorithms.algorithm import MOST_BYTES, Algorithm
from workbench.comm.algorithms.flat import FLAT
from workbench.comm.messages.flat import MessageRound
from workbench.plan.collective.codec import Codec
from workbench.plan.extension.user_object import OwnObjectError
from workbench.predict.traffic import collective_costs

CASES = [(k, n) for k in range(1, 10) for n in sorted({0, 1, k - 1, k, 5, 1003})]


def counts(costs):
    return tuple(tuple(each.tolist()) for each in (costs.messages, costs.bytes, costs.rounds))


@pytest.mark.parametrize("name", FLAT)
@pytest.mark.parametrize("itemsize", [2, 4, 8])
def test_built_in_ones_exchange_what_their_formulas_say(name, itemsize):
    for ranks, length in CASES:
        dry = FLAT[name].dry(length, itemsize, ranks)
        formula = collective_costs.FLAT[name](length, itemsize, ranks)
        assert (dry.messages, dry.bytes, dry.rounds) == counts(formula), (ranks, length)
        assert sum(dry.additions) == (ranks - 1) * length  # whoever adds up an element
        part = collective_costs.Part(name, length, itemsize, None, 1)
        pairs = collective_costs.summed(part, (1,) * ranks)
        assert [list(row) for row in dry.pairs] == pairs.tolist(), (ranks, length)


@pytest.mark.parametrize("name", ["ring", "direct"])
def test_so_they_do_through_a_codec(name):
    codec = Codec(name="int8", chunk=16)
    formula = getattr(collective_costs, name)
    for ranks, length in CASES:
        dry = FLAT[name].dry(length, 4, ranks, codec.encoded_bytes)
        costs = formula(length, 4, ranks, codec)
        assert (dry.messages, dry.bytes, dry.rounds) == counts(costs), (ranks, length)
        if ranks > 1 and length % ranks == 0:
            own = length // ranks  # (3 k - 1) / k of all, as `predict/time/replicas.py` has it
            assert set(dry.encoded) == {ranks * own}
            assert set(dry.decoded) == {(2 * ranks - 1) * own}


@pytest.mark.parametrize(("name", "rounds"), [("direct", 2), ("ring", 6), ("halving_doubling", 4)])
def test_the_longest_chain_of_equal_ranks_is_what_each_does(name, rounds):
    dry = FLAT[name].dry(400, 4, 4)
    assert (dry.longest.rounds, dry.longest.bytes) == (rounds, 2 * 300 * 4)
    assert dry.longest.additions == 300
    assert set(dry.additions) == {300}


def test_a_tree_waits_for_its_levels():
    """Rank 0 receives twice and sends twice, and rank 3 waits for all of it."""
    dry = Tree().dry(100, 4, 4)
    assert dry.messages == (2, 1, 2, 1)
    assert dry.rounds == (4, 2, 4, 2)
    assert dry.additions == (200, 0, 100, 0)
    assert dry.pairs[0] == (0, 400, 400, 0)
    assert (dry.longest.rounds, dry.longest.bytes, dry.longest.additions) == (4, 1600, 200)
    assert dry.memory == (400, 0, 400, 0)


class Chain(Algorithm):
    """Each rank hands on what it has to the next; the last one sends the sum to all."""

    def rounds(self, flat, members, me):
        k, room = len(members), torch.empty_like(flat)
        if me > 0:
            yield MessageRound(receives=((members[me - 1], room),), additions=len(flat))
            flat += room
        if me < k - 1:
            yield MessageRound(sends=((members[me + 1], flat),))
            yield MessageRound(receives=((members[-1], flat),))
        else:
            yield MessageRound(sends=tuple((member, flat) for member in members[:-1]))


def test_the_longest_chain_is_that_of_the_rank_that_ends_last():
    """Before the last rank sends, three messages have come one after the other, each added."""
    dry = Chain().dry(100, 4, 4)
    assert dry.additions == (0, 100, 100, 100)
    assert (dry.longest.rounds, dry.longest.bytes, dry.longest.additions) == (4, 2400, 300)


class Pairs(Algorithm):
    """Two ranks sum; two others have nothing to do with them."""

    def rounds(self, flat, members, me):
        if me < 2:
            room = torch.empty_like(flat)
            other = members[1 - me]
            yield MessageRound(((other, flat.clone()),), ((other, room),), len(flat))
            flat += room


def test_ranks_without_messages_do_not_shorten_the_longest_chain():
    dry = Pairs().dry(100, 4, 4)
    assert dry.rounds == (1, 1, 0, 0)
    assert (dry.longest.rounds, dry.longest.bytes, dry.longest.additions) == (1, 400, 100)


def test_who_sends_to_all_at_once_takes_as_long_for_each():
    dry = Star().dry(100, 4, 5)
    assert (dry.longest.rounds, dry.longest.bytes) == (2, 2 * 4 * 400)
    coded = Star().dry(100, 4, 5, lambda n: n + 4)
    assert coded.bytes == (4 * 104, 104, 104, 104, 104)
    assert coded.encoded == (100,) * 5
    assert coded.decoded == (500, 100, 100, 100, 100)
    assert coded.pieces == (6, 2, 2, 2, 2)


class Growing(Algorithm):
    """Each round has more room than the one before, which has gone by then."""

    def rounds(self, flat, members, me):
        for size in range(1, 6):
            room = flat.new_empty(size * len(flat))
            sends, receives = (members[me - 1], room.clone()), (members[me - 1], room)
            yield MessageRound((sends,), (receives,))


def test_the_most_memory_is_that_of_the_largest_round():
    """Also where what is new lies where something was that has gone."""
    assert Growing().dry(100, 4, 2).memory == (2 * 5 * 400,) * 2


class Wrong(Algorithm):
    """Fails in a way of its own."""

    def __init__(self, how):
        self.how = how

    def rounds(self, flat, members, me):
        room, other = torch.empty_like(flat), members[1 - me] if len(members) == 2 else 0
        match self.how:
            case "both send first":
                yield MessageRound(sends=((other, flat),))
                yield MessageRound(receives=((other, room),))
            case "one receives twice":
                yield MessageRound(((other, flat),), ((other, room),))
                if me:
                    yield MessageRound(receives=((other, room),))
            case "nobody receives":
                yield MessageRound(sends=((other, flat),) * (me == 0))
            case "lengths":
                short = room[:1] if me else room
                yield MessageRound(((other, flat),), ((other, short),))
            case "types":
                yield MessageRound(((other, flat),), ((other, room.double()),))
            case "outside":
                yield MessageRound(sends=((2, flat),))
            case "itself":
                yield MessageRound(((me, flat),), ((me, room),))
            case "overlap":
                yield MessageRound(((other, flat),), ((other, flat),))
            case "strided":
                yield MessageRound(sends=((other, flat[::2]),))
            case "endless":
                while True:
                    yield MessageRound()
            case "no round":
                yield ((other, flat),)
            case "raises":
                raise KeyError("my own")


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("both send first", "rank 0 waits in round 1 to send to rank 1; rank 1 waits in round 1"),
        ("one receives twice", "rank 1 waits in round 2 for rank 0, which has ended"),
        ("nobody receives", "rank 0 waits in round 1 to send to rank 1, which has ended"),
        ("lengths", "rank 0 sends rank 1 4 elements of float32, which receives 1 elements"),
        ("types", "sends rank . 4 elements of float32, which receives 4 elements of float64"),
        ("outside", "rank 0 sends rank 2, and its others are the rest of ranks 0 to 1"),
        ("itself", "rank 0 sends rank 0, and its others are the rest"),
        ("overlap", "rank 0 receives, in round 1, into memory that it sends or receives at the"),
        ("strided", r"a piece of shape \(2,\) and stride \(2,\): pieces are flat and contiguous"),
        ("endless", "rank 0 has not ended after 131,072 rounds"),
        ("no round", "which is no MessageRound"),
        ("raises", "KeyError: 'my own'"),
    ],
)
def test_what_does_not_fit_together_is_refused(how, said):
    with pytest.raises(OwnObjectError, match=f"algorithm 'Wrong', 4 elements on 2 ranks: .*{said}"):
        Wrong(how).dry(4, 4, 2)


class Looking(Star):
    """Looks at values, which decide nothing."""

    def rounds(self, flat, members, me):
        assert flat.sum().item() == 0 or me >= 0
        yield from super().rounds(flat, members, me)


def test_one_that_looks_at_values_gets_zeros_as_long_as_there_is_room():
    assert Looking().dry(100, 4, 5) == Star().dry(100, 4, 5)
    with pytest.raises(OwnObjectError, match=r"fails on tensors without values, and .* more than"):
        Looking().dry(MOST_BYTES // 4, 4, 2)


def test_large_sums_on_many_ranks_take_no_memory():
    dry = Tree().dry(10**9, 4, 64)
    assert dry.longest.bytes == 12 * 4 * 10**9
