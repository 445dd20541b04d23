"""What "auto" stands for."""

from typing import get_args

import pytest

from workbench.plan.collective.algorithm import (
    CODED,
    MOST_DIRECT,
    THRESHOLDS,
    AlgorithmName,
    chosen,
)

NAMED = [name for name in get_args(AlgorithmName) if name != "auto"]
SMALL, LARGE = THRESHOLDS.direct, THRESHOLDS.direct + 1


@pytest.mark.parametrize("name", NAMED)
@pytest.mark.parametrize("hosts", [(4,), (2, 2), (1, 1, 1)])
def test_what_is_named_is_done(name, hosts):
    assert {chosen(name, hosts, "gloo", SMALL, beside=beside) for beside in (0, 1)} == {name}


@pytest.mark.parametrize(
    ("hosts", "backend", "nbytes", "beside", "expected"),
    [
        ((4,), "gloo", LARGE, False, "direct"),  # through shared memory
        ((4,), "gloo", SMALL, True, "backend"),
        ((2, 2), "gloo", SMALL, False, "hierarchical"),
        ((3, 1), "gloo", LARGE, True, "hierarchical"),
        ((2, 1), "gloo", SMALL, False, "hierarchical"),
        ((1, 1, 1), "gloo", SMALL, False, "direct"),
        ((1, 1, 1), "gloo", LARGE, False, "backend"),
        ((1, 1, 1), "gloo", SMALL, True, "backend"),
        ((1, 1, 1), "nccl", SMALL, False, "backend"),
    ],
)
def test_auto_depends_on_hosts_size_and_haste(hosts, backend, nbytes, beside, expected):
    assert chosen("auto", hosts, backend, nbytes, beside=beside) == expected


@pytest.mark.parametrize(
    ("hosts", "expected"),
    [
        ((4,), "direct"),
        ((2, 2), "hierarchical"),
        ((3, 1), "hierarchical"),
        ((1,) * MOST_DIRECT, "direct"),
        ((1,) * (MOST_DIRECT + 1), "ring"),
    ],
)
def test_auto_with_a_codec_depends_on_hosts_alone(hosts, expected):
    for nbytes, beside in ((SMALL, True), (LARGE, False)):
        assert chosen("auto", hosts, "gloo", nbytes, beside=beside, codec="int8") == expected


@pytest.mark.parametrize("name", NAMED)
def test_some_take_no_codec(name):
    if name in CODED:
        assert chosen(name, (4,), "gloo", SMALL, beside=True, codec="int8") == name
        return
    with pytest.raises(ValueError, match=f"algorithm '{name}' cannot take codec 'int8'; 'auto', "):
        chosen(name, (4,), "gloo", SMALL, beside=True, codec="int8")


def test_others_are_refused():
    with pytest.raises(ValueError, match=r"no all-reduce algorithm 'tree'; there are 'auto', "):
        chosen("tree", (4,), "gloo", 1, beside=False)
