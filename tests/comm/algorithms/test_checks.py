"""Each check of an algorithm fails for one that does just that wrong."""

from dataclasses import replace

import pytest
import torch

from tests.own_sums import Star, Tree
from workbench.comm.algorithms.algorithm import Algorithm
from workbench.comm.algorithms.checks import checks_of
from workbench.comm.algorithms.flat import FLAT
from workbench.comm.messages.flat import MessageRound


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", [*FLAT.values(), Tree(), Star()], ids=lambda a: a.name)
def test_right_ones_pass(algorithm):
    found = checks_of(algorithm)
    assert all(check.ok for check in found), found
    assert len(found) == (10 if algorithm.takes_codec else 6)


class Twice(Tree):
    """Sums some elements twice."""

    def rounds(self, flat, members, me):
        if me == 1:
            flat[:1] *= 2
        yield from super().rounds(flat, members, me)


class OwnBits(Tree):
    """One rank rounds differently."""

    def rounds(self, flat, members, me):
        yield from super().rounds(flat, members, me)
        if me == 1 and len(flat) > 2:
            flat[2] = torch.nextafter(flat[2], flat[2] + 1)


class Sparse(Star):
    """What it sends depends on values."""

    def rounds(self, flat, members, me):
        if len(members) > 1 and flat.any():
            other, room = members[me - 1], torch.empty_like(flat)
            yield MessageRound(((other, flat),), ((members[(me + 1) % len(members)], room),))
        yield from super().rounds(flat, members, me)


class Stuck(Tree):
    """Three ranks wait for each other."""

    def rounds(self, flat, members, me):
        if len(members) == 3:
            yield MessageRound(receives=((members[me - 1], torch.empty_like(flat)),))
        yield from super().rounds(flat, members, me)


class Weighted(Tree):
    """No sum: what it does to x is not what it does to y."""

    def rounds(self, flat, members, me):
        flat *= me + 1
        yield from super().rounds(flat, members, me)


class Lossy(Star):
    """Forgets what one rank has encoded."""

    def coded_rounds(self, flat, members, me, coding):
        if me == 2:
            flat.zero_()
        yield from super().coded_rounds(flat, members, me, coding)


class Undecoded(Star):
    """The first rank keeps its own sum, and does not decode what it has sent."""

    def coded_rounds(self, flat, members, me, coding):
        exact = None
        for exchange in super().coded_rounds(flat, members, me, coding):
            exact = flat.clone()
            yield exchange
        if me == 0 and exact is not None:
            flat.copy_(exact)


class Stating(Tree):
    """States so many times the additions that it makes."""

    def __init__(self, times):
        self.times = times

    def rounds(self, flat, members, me):
        for one in super().rounds(flat, members, me):
            yield replace(one, additions=self.times * one.additions)


FIT, SUM, BITS = "messages fit", "the sum is torch's", "all ranks have the same bits"
DRY, ADJOINT = "a dry run exchanges", "the sum is its own adjoint"
ADDED = "additions are as many"


@pytest.mark.parametrize(
    ("algorithm", "failing"),
    [
        (Twice(), {SUM, ADJOINT}),
        (OwnBits(), {BITS}),
        (Sparse(), {DRY}),
        (Stuck(), {FIT, SUM, BITS, DRY, ADDED, ADJOINT}),
        (Stating(0), {ADDED}),
        (Stating(2), {ADDED}),
        (Weighted(), {SUM, ADJOINT}),
        (Lossy(), {"coded: exact through", "coded: what error feedback"}),
        (Undecoded(), {"coded: all ranks", "coded: what error feedback"}),
    ],
    ids=lambda a: getattr(a, "name", ""),
)
def test_wrong_ones_fail_where_they_are_wrong(algorithm, failing):
    found = {check.what: check for check in checks_of(algorithm)}
    wrong = {what for what, check in found.items() if not check.ok}
    assert {next(f for f in [*failing, what] if what.startswith(f)) for what in wrong} == failing
    assert all(" on " in found[what].said for what in wrong)  # which case it was


class Product(Star):
    """Adds by a product with ones, which is not counted."""

    def rounds(self, flat, members, me):
        rooms = flat.new_empty(len(members) - 1, len(flat))
        others = [other for other in members if other != members[me]]
        if others:
            sends = tuple((other, flat) for other in others)
            yield MessageRound(sends, tuple(zip(others, rooms, strict=True)), rooms.numel())
        parts = [*rooms[:me], flat, *rooms[me:]]
        flat.copy_(torch.ones(len(parts), dtype=flat.dtype) @ torch.stack(parts))

    coded_rounds = Algorithm.coded_rounds


def test_additions_that_are_not_seen_are_believed():
    assert all(check.ok for check in checks_of(Product()))


class Alone(Tree):
    """Right with others, and wrong where a rank has none."""

    def rounds(self, flat, members, me):
        if len(members) == 1:
            flat *= 2
        yield from super().rounds(flat, members, me)


def test_one_rank_is_a_case_too():
    wrong = [check for check in checks_of(Alone()) if not check.ok]
    assert wrong
    assert all(" on 1 ranks" in check.said for check in wrong)
