"""Combinations of values, and a table of what came of them."""

import math

import pytest

from tests.plan.graphs import vgg
from tests.scheduler.values import request
from workbench.client.records.runs import differences
from workbench.client.sweep import results, variations
from workbench.plan import SGD, Adam, Experiment, ExperimentError, LocalSGD, Plan, Synchronous
from workbench.plan.experiment.metrics import COLUMNS
from workbench.store import messages
from workbench.store.rank_files import RankFiles
from workbench.store.store import Store
from workbench.store.telemetry import pack_row

GRAPH = vgg()
HYBRID, PARALLEL = Plan.hybrid(GRAPH, 4), Plan.data_parallel(GRAPH, 4)
BASE = Experiment(plan=HYBRID, data="digits", optimizer=SGD(lr=0.1, momentum=0.9), steps=10)


def test_every_combination_has_a_name():
    varied = variations(BASE, lr=[0.1, 0.2], plan=[HYBRID, PARALLEL], batch_size=(64,))
    assert [each.name for each in varied] == [
        "lr=0.1, plan=cut over 4, 4 ranks, batch_size=64",
        "lr=0.1, plan=data parallel, 4 ranks, batch_size=64",
        "lr=0.2, plan=cut over 4, 4 ranks, batch_size=64",
        "lr=0.2, plan=data parallel, 4 ranks, batch_size=64",
    ]
    last = varied[-1].experiment
    assert (last.optimizer, last.batch_size) == (SGD(lr=0.2, momentum=0.9), 64)
    assert last.plan == PARALLEL
    assert varied[-1].values == {"lr": 0.2, "plan": PARALLEL, "batch_size": 64}


def test_optimizers_and_their_fields():
    varied = variations(BASE, optimizer=[SGD(lr=1.0), Adam()], lr=[0.1])
    assert [each.experiment.optimizer for each in varied] == [SGD(lr=0.1), Adam(lr=0.1)]
    assert [each.experiment for each in variations(BASE)] == [BASE]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"speed": [1]}, "neither an experiment nor its SGD has speed; there are accumulate"),
        ({"lr": [0.1, -1.0]}, "lr=-1.0: SGD: lr: .* greater than 0"),
        ({"lr": 0.1}, r"lr: a list of values is needed, got 0.1; \[0.1\]"),
        ({"data": "digits"}, "a list of values is needed, got 'digits'"),
        ({"lr": []}, "lr: a list of values is needed, got none"),
    ],
)
def test_what_cannot_be_is_named(values, message):
    with pytest.raises(ExperimentError, match=message):
        variations(BASE, **values)


def test_only_differences_are_told():
    varied = variations(BASE, lr=[0.1, 0.2], sync=[Synchronous(), LocalSGD(every=5)])
    found = differences([each.experiment for each in varied])
    assert [(each["lr"], each["sync.every"]) for each in found] == [
        (0.1, None),
        (0.1, 5),
        (0.2, None),
        (0.2, 5),
    ]
    assert not any({"momentum", "plan", "batch_size"} & each.keys() for each in found)


def test_plans_that_look_alike_are_told_apart():
    other = HYBRID.with_layer(next(iter(HYBRID.layers)), scheme="replicate", group_size=1)
    plans = [HYBRID, Plan.filters(GRAPH, 4, shares=(1, 1, 1, 1)), HYBRID, other]
    found = [each["plan"] for each in differences([BASE.replace(plan=plan) for plan in plans])]
    assert found[0] == found[2]
    assert len(set(found)) >= 2


def test_the_table_says_what_came_of_each(tmp_path):
    store = Store(tmp_path / "server.sqlite", create=True)
    for each in variations(BASE, lr=[0.1, 0.2]):
        own = {"name": each.name, "directory": str(tmp_path / str(each.values["lr"]))}
        store.submit(request(4, packed=messages.pack(each.experiment), tag="mine", **own))
    store.submit(request(4, packed=messages.pack(BASE), tag="other"))
    store.claim(1, 0, ())
    files = RankFiles(tmp_path / "0.1" / "attempts" / "1", 0)
    files.begin()
    nothing = dict.fromkeys(COLUMNS, 0.0)
    packed = b"".join(pack_row({**nothing, "step": step, "loss": 0.25}) for step in range(10))
    files.rows.write_bytes(packed + b"half a row")
    store.release(1, "finished", step=10, started_at=100.0, ended_at=104.5)
    table = results(store, "mine")
    assert list(table["job"]) == [1, 2]
    assert list(table["lr"]) == [0.1, 0.2]
    assert list(table["state"]) == ["finished", "queued"]
    done, waiting = table.iloc[0], table.iloc[1]
    assert (done["step"], done["loss"], done["duration"]) == (10, 0.25, 4.5)
    assert math.isnan(waiting["loss"])
    assert math.isnan(waiting["duration"])
    assert results(store, "nothing").empty
    store.close()
