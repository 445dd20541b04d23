"""The phases of an all-reduce: nothing in between, the bytes of the record, and only if asked."""

import time
from collections import Counter
from statistics import median

import pytest
import torch

from tests.ranks import all_ranks
from workbench.comm.all_reduce import all_reduce, start_all_reduce
from workbench.comm.collectives import all_gather
from workbench.comm.messages.recorder import PhaseLog, Recorder
from workbench.plan.placement.placement import Shard

RUNS = [
    ("ring", None),
    ("direct", None),
    ("halving_doubling", None),
    ("hierarchical", None),
    ("backend", None),
    ("ring", "int8"),
    ("direct", "bf16"),
    ("hierarchical", "int8"),
]


def traced(world):
    """Of each algorithm blocking, plain and in a buffer: its trace, seconds, and record."""
    group, found = all_ranks(world), []
    for name, codec in RUNS:
        x = torch.randn(300_000)
        buffer = group.buffer(len(x), x)
        buffer.copy_(x)
        for kind in ("blocks", "plain", "buffer"):
            all_gather(torch.zeros(1), Shard(0, (1,) * world.size), group)  # together
            how = {"algorithm": name, "codec": codec, "layer": f"{name} {codec} {kind}"}
            with world.recorder.tracing() as traces:
                began = time.perf_counter()
                if kind == "blocks":
                    all_reduce(x, group, **how)
                else:
                    pending = start_all_reduce(buffer if kind == "buffer" else x, group, **how)
                    while not pending.poll():
                        time.sleep(0.001)
                seconds = time.perf_counter() - began
            found.append((name, codec, kind, traces, seconds))
    rows = {row.layer: (row.bytes, row.rounds) for row in world.recorder.rows()}
    all_reduce(torch.ones(3), group)
    assert len(traces) == 1  # nobody asks any more
    return found, rows


@pytest.mark.parametrize("hosts", ["aaa", "aab", "abc"])
def test_phases_fill_an_all_reduce_and_say_what_travels(on_ranks, hosts):
    around, sent, came = [], Counter(), Counter()
    for rank, (found, rows) in enumerate(on_ranks(3, traced, hosts=hosts)):
        for name, codec, kind, traces, seconds in found:
            (trace,) = traces
            assert (trace.rank, trace.op) == (rank, "all_reduce")
            assert trace.layer == f"{name} {codec} {kind}"
            end = 0.0
            for phase in trace.phases:
                assert phase.start_s == pytest.approx(end, abs=1e-12)
                end = phase.start_s + phase.seconds
            assert end == pytest.approx(trace.seconds, abs=1e-12)
            assert trace.seconds <= seconds
            around.append(seconds - trace.seconds)
            seen = {phase.name for phase in trace.phases}
            coded = codec is not None and not (name == "hierarchical" and hosts == "aaa")
            assert {"encode", "decode"} <= seen if coded else {"encode", "decode"}.isdisjoint(seen)
            assert "wait" in seen
            if name in ("ring", "halving_doubling") or (name == "direct" and coded):
                nbytes, rounds = rows[trace.layer]
                assert sum(p.bytes for p in trace.phases if p.name == "wait") == nbytes
                assert max(p.round for p in trace.phases) == rounds
                came[trace.layer] += nbytes
                sent[trace.layer] += sum(p.bytes for p in trace.phases if p.name == "send")
    assert sent == came
    # A few calls, which a busy machine may interrupt, though not most of the time.
    assert median(around) < 0.05


def test_a_log_keeps_what_goes_on_together():
    log = PhaseLog()
    for name, nbytes in [("copy", 0), ("send", 3), ("send", 4), ("wait", 5), ("wait", 6)]:
        log.mark(name, nbytes)
    seconds, phases = log.close()
    assert [(p.name, p.round, p.bytes) for p in phases] == [
        ("copy", 0, 0),
        ("send", 1, 3),
        ("send", 2, 4),
        ("wait", 2, 11),
    ]
    assert seconds == pytest.approx(sum(phase.seconds for phase in phases))


def test_who_asked_before_is_asked_again():
    recorder = Recorder()
    with recorder.tracing() as outer:
        with recorder.tracing() as inner:
            assert recorder.traces is inner
        assert recorder.traces is outer
    assert recorder.traces is None
