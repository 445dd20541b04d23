"""Coded all-reduces between processes: bits, bytes, phases, and what is refused."""

import pytest
import torch

from tests.ranks import all_ranks
from workbench.comm.all_reduce import all_reduce, start_all_reduce
from workbench.comm.collectives import all_gather
from workbench.comm.messages.errors import CodecError, CommError
from workbench.comm.messages.flat import even
from workbench.plan.collective.codec import Codec
from workbench.plan.placement.placement import Shard

CASES = [
    (0, torch.float32, Codec(name="int8")),
    (1, torch.float32, Codec(name="int8")),
    (1003, torch.float32, Codec(name="int8", chunk=64)),
    (1003, torch.float64, Codec(name="int4", chunk=64)),
    (70_001, torch.float32, Codec(name="bf16_truncated")),
    (50, torch.bfloat16, Codec(name="bf16")),
    (500, torch.float16, Codec(name="fp16")),
    (500, torch.float32, Codec(name="top_k", fraction=0.2, error_feedback=True)),
]


def sample(length, rank, dtype):
    generator = torch.Generator().manual_seed(1000 * length + rank)
    return torch.randn(length, generator=generator, dtype=torch.float64).to(dtype)


def sums(world, algorithm):
    """Each case out of place, in place and in a buffer: whether bits agree, and the error."""
    group, found = all_ranks(world), []
    for case, (length, dtype, codec) in enumerate(CASES):
        x = sample(length, world.rank, dtype)
        before, wide = x.clone(), torch.float32 if dtype.itemsize == 2 else dtype
        residuals = [
            torch.zeros(length, dtype=wide) if codec.error_feedback else None for _ in range(3)
        ]
        how = {"algorithm": algorithm, "codec": codec}
        labels = [f"{case} {kind}" for kind in ("blocks", "plain", "buffer")]
        first = all_reduce(x, group, residual=residuals[0], layer=labels[0], **how)
        assert torch.equal(x, before)
        start_all_reduce(x, group, residual=residuals[1], layer=labels[1], **how).wait()
        buffer = group.buffer(length, x)
        buffer.copy_(before)
        pending = start_all_reduce(buffer, group, residual=residuals[2], layer=labels[2], **how)
        while not pending.poll():
            pass
        exact = sum(sample(length, rank, dtype).double() for rank in range(world.size))
        everywhere = all_gather(first[None], Shard(0, (1,) * world.size), group)
        assert torch.equal(everywhere, first.expand_as(everywhere))
        off = first.double() - exact
        if residuals[0] is not None:  # what is held back arrives later
            off += all_reduce(residuals[0], group).double()
        error = (off.norm() / exact.norm()).item() if length else 0.0
        found.append((torch.equal(first, x) and torch.equal(first, buffer), error))
    rows = {r.layer: (r.messages, r.bytes, r.rounds) for r in world.recorder.rows()}
    return found, rows


TOLERATED = (0.0, 0.02, 0.03, 0.4, 0.02, 0.02, 2e-3, 1e-6)


def check(answers, received):
    """Everybody's sums are right, and what came is what `received(sizes, rank)` says."""
    size = len(answers)
    for rank, (found, rows) in enumerate(answers):
        for case, (length, _, codec) in enumerate(CASES):
            same, error = found[case]
            assert same, case
            assert error <= TOLERATED[case], (case, error)
            sizes = [codec.encoded_bytes(n) for n in even(length, size)]
            messages = received(sizes, rank)
            for kind in ("blocks", "plain", "buffer"):
                count, nbytes, _ = rows[f"{case} {kind}"]
                assert (count, nbytes) == (sum(n > 0 for n in messages), sum(messages)), case


def of_direct(sizes, rank):
    return [sizes[rank]] * (len(sizes) - 1) + [n for i, n in enumerate(sizes) if i != rank]


def of_ring(sizes, rank):
    there = [n for i, n in enumerate(sizes) if i != (rank - 1) % len(sizes)]
    return there + [n for i, n in enumerate(sizes) if i != rank]


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize(("name", "received"), [("ring", of_ring), ("direct", of_direct)])
def test_on_one_host(on_ranks, name, received, size):
    answers = on_ranks(size, sums, name)
    check(answers, received if size > 1 else lambda sizes, rank: [])


@pytest.mark.slow
@pytest.mark.parametrize(("name", "received"), [("ring", of_ring), ("auto", of_direct)])
def test_across_hosts(on_ranks, name, received):
    check(on_ranks(4, sums, name, hosts="abcd"), received)


def of_hosts(hosts, rank, length, codec):
    """Bytes that a rank receives of a sum of fp32 that is coded between hosts only."""
    names = sorted(set(hosts))
    counts = [hosts.count(name) for name in names]
    here = names.index(hosts[rank])
    mine = hosts[:rank].count(hosts[rank])
    sizes = even(length, counts[here])
    within = 4 * (sizes[mine] * (counts[here] - 1) + sum(sizes) - sizes[mine])
    return within, sizes[mine]


@pytest.mark.parametrize("hosts", ["aabb", "aab", "aabc"])
def test_hierarchical_codes_between_hosts_only(on_ranks, hosts):
    answers = on_ranks(len(hosts), sums, "auto", hosts=hosts)
    for rank, (found, rows) in enumerate(answers):
        for case, (_, dtype, _) in enumerate(CASES):
            same, error = found[case]
            assert same or dtype.itemsize == 2, case
            assert error <= TOLERATED[case], (case, error)
        if hosts == "aabb":  # each rank swaps its half with one other
            within, half = of_hosts(hosts, rank, 1003, CASES[2][2])
            assert rows["2 blocks"][1] == within + CASES[2][2].encoded_bytes(half)
            assert rows["2 buffer"][1] == rows["2 blocks"][1]


def on_shared_memory(world):
    x = torch.randn(100)
    coded = all_reduce(x, all_ranks(world), algorithm="hierarchical", codec=Codec(name="int4"))
    return torch.equal(coded, all_reduce(x, all_ranks(world, "other")))


def test_hierarchical_within_one_host_is_exact(on_ranks):
    assert all(on_ranks(3, on_shared_memory))


def many_at_once(world):
    """Several under way in a group, waited for in another order on every rank."""
    group = all_ranks(world)
    codecs = [Codec(name=name) for name in ("bf16", "fp16", "int8")] * 3
    names = ("ring", "direct", "auto") * 3
    flats = [torch.full((500 + i,), float(i + world.rank)) for i in range(9)]
    pendings = [
        start_all_reduce(flat, group, algorithm=name, codec=codec)
        for flat, name, codec in zip(flats, names, codecs, strict=True)
    ]
    generator = torch.Generator().manual_seed(world.rank)
    for index in torch.randperm(9, generator=generator).tolist():
        pendings[index].wait()
    return [flat.unique().tolist() for flat in flats]


@pytest.mark.parametrize("hosts", ["aaaa", "aabb"])
def test_ranks_may_wait_in_any_order(on_ranks, hosts):
    for values in on_ranks(4, many_at_once, hosts=hosts):
        for index, value in enumerate(values):
            assert value == [pytest.approx(4.0 * index + 6.0, rel=1e-5)]


def overflows(world):
    """Parts that fp16 holds, whose sum it does not."""
    x = torch.full((99,), 3e4)
    try:
        all_reduce(x, all_ranks(world), codec=Codec(name="fp16"), layer="fc")
    except CodecError as error:
        return str(error)
    raise AssertionError("a sum that fp16 does not hold")


def test_an_overflow_of_the_sum_names_layer_rank_and_magnitude(on_ranks):
    for rank, said in enumerate(on_ranks(3, overflows)):
        assert said == (
            "codec 'fp16' in all_reduce of layer 'fc' (call 1 of group world(0,1,2)), "
            f"rank {rank}: holds magnitudes up to 65504, and got 90000; "
            "bf16 and int8 hold larger ones"
        )


def one_has_nan(config):
    from workbench.comm.groups.world import World

    try:
        with World.open(config) as world:
            x = torch.ones(99)
            x[50] = torch.nan if world.rank == 1 else 1.0
            all_reduce(x, all_ranks(world), codec=Codec(name="int8"), layer="fc")
    except CommError as error:
        return type(error).__name__, str(error)


def test_what_one_rank_cannot_encode_all_are_told(on_ranks):
    answers = on_ranks.seated(3, one_has_nan)
    assert answers[1][0] == "CodecError"
    assert "rank 1: 1 of 33 values to be encoded are NaN" in answers[1][1]
    for rank in (0, 2):
        assert answers[rank][0] == "PeerLost"
        assert "rank 1 gave up after CodecError: codec 'int8' in all_reduce" in answers[rank][1]


def refused(world):
    group, x = all_ranks(world), torch.ones(4)
    plain, feedback = Codec(name="int8"), Codec(name="int8", error_feedback=True)
    messages = []
    for arguments in (
        {"x": torch.ones(4, dtype=torch.int64), "codec": plain},
        {"codec": plain, "algorithm": "backend"},
        {"codec": plain, "algorithm": "halving_doubling"},
        {"codec": feedback},
        {"codec": plain, "residual": torch.zeros(4)},
        {"residual": torch.zeros(4)},
        {"codec": feedback, "residual": torch.zeros(4, dtype=torch.float64)},
    ):
        arguments = {"x": x, **arguments}
        tensor = arguments.pop("x")
        for function in (all_reduce, start_all_reduce):
            with pytest.raises(ValueError) as caught:  # noqa: PT011 - the caller reads it
                function(tensor, group, **arguments)
        messages.append(str(caught.value))
    return messages, all_reduce(x, group).tolist()  # nobody has begun anything


def test_what_cannot_be_coded_is_refused_before_anybody_communicates(on_ranks):
    for messages, total in on_ranks(2, refused):
        valid = "'auto', 'direct', 'ring', 'hierarchical' can"
        assert messages == [
            "codec 'int8' is for floating-point tensors, got torch.int64",
            f"algorithm 'backend' cannot take codec 'int8'; {valid}",
            f"algorithm 'halving_doubling' cannot take codec 'int8'; {valid}",
            "codec 'int8' with error_feedback=True needs a residual",
            "codec 'int8' with error_feedback=False has no use for a residual",
            "a residual is for a codec with error feedback, and group world(0,1) was given no "
            "codec",
            "the residual of codec 'int8' in group world(0,1) has (shape, dtype, device) "
            "((4,), torch.float32, 'cpu'), got ((4,), torch.float64, 'cpu')",
        ]
        assert total == [2.0] * 4
