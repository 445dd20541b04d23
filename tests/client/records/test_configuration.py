"""What a table shows of an algorithm or codec of one's own."""

from tests.own_sums import Sign, Star
from tests.plan.graphs import mlp
from workbench.client.records.runs import differences
from workbench.client.run.own_objects import kept
from workbench.plan import SGD, Experiment, Plan, Synchronous


class Chunked(Star):
    def __init__(self, chunks):
        self.chunks = chunks


def test_they_are_named_and_versions_told_apart(tmp_path):
    plan = Plan.data_parallel(mlp(4, 4), 2)
    one, two, coded = (
        kept(Experiment(plan=plan, data="digits", optimizer=SGD(0.1), steps=1, sync=sync), tmp_path)
        for sync in (
            Synchronous(algorithm=Chunked(1)),
            Synchronous(algorithm=Chunked(2)),
            Synchronous(algorithm="tests.own_sums:Star", codec=Sign()),
        )
    )
    found = differences([one, two, coded])
    first, second, imported = (fields["sync.algorithm"] for fields in found)
    assert first != second
    assert {first[:9], second[:9]} == {"Chunked ("}
    assert imported == "Star"
    assert found[2]["sync.codec"].startswith("Sign (")
    assert found[2]["sync.codec"].endswith("), with error feedback")
    assert differences([one, Experiment.from_toml(one.to_toml())]) == [{}, {}]
