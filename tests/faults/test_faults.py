"""Every process of a cluster, and what it stands on, struck at many moments of its work.

A few cells are tried; `FAULTS=all pytest tests/faults` tries all 272, for about an hour. Root is
needed for disks, hosts and the limit of memory.
"""

import os

import pytest

from tests.faults.matrix import matrix
from tests.faults.table import TABLES, cells

EVERY = os.environ.get("FAULTS") == "all"
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def cluster(request):
    with matrix(request.param) as one:
        yield one


@pytest.mark.parametrize(
    ("cluster", "fault"),
    [(table, fault) for table in TABLES for fault in cells(table, every=EVERY)],
    indirect=["cluster"],
    ids=str,
)
def test_what_is_struck_keeps_its_promise(cluster, fault):
    cluster.suffer(fault)


def test_the_matrix_has_every_cell():
    assert {table: len(cells(table, every=True)) for table in TABLES} == {
        "here": 190,
        "hosts": 66,
        "network": 16,
    }
