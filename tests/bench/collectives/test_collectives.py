"""The benchmark runs, quickly, and gives every figure."""

import json
import time

import pytest
import torch

from tests.ranks import all_ranks
from workbench.bench import codecs
from workbench.bench.__main__ import main
from workbench.bench.collectives import collectives, links
from workbench.bench.collectives.collectives import NAMED
from workbench.bench.collectives.links import apart, late
from workbench.bench.progress import Part, Progress
from workbench.bench.report import Report
from workbench.comm.all_reduce import start_all_reduce
from workbench.predict.closed_form import Fit, Network
from workbench.predict.closed_form.fit import CONSTANTS

REPORT = Report("nothing", (), {})
SIZES = ("1KB", "64KB", "1MB", "4MB")


@pytest.mark.slow
def test_quick(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["collectives", "--quick", "--json", "found.json"]) == 0
    content = json.loads((tmp_path / "found.json").read_text())
    named = (f"{name}_over_gloo_vs_gloo" for name in NAMED)
    kinds = ("all_reduce_vs_gloo", "bucket_vs_gloo", "all_reduce_vs_over_gloo", *named)
    assert {f"{kind}_{size}" for kind in kinds for size in SIZES} <= set(content["figures"])
    assert {"direct_vs_ring_5ms_4_1KB", "prediction_error_5ms_4"} <= set(content["figures"])
    shaped = "direct_vs_gloo_1gbit_4_1MB" in content["figures"]
    assert shaped or any("1gbit were not measured" in note for note in content["notes"])
    assert all(0 < f["min"] <= f["median"] <= f["max"] for f in content["figures"].values())
    assert any("through shared memory" in note for note in content["notes"])


def lateness(world):
    """Seconds of a sum whose messages are late, and the rounds that it took."""
    found = []
    for name in ("direct", "ring"):
        world.recorder.reset()
        with late(apart(all_ranks(world)), 0.05) as group:
            flat, began = torch.ones(6), time.perf_counter()
            start_all_reduce(flat, group, algorithm=name).wait()
            seconds = time.perf_counter() - began
        (row,) = world.recorder.rows()
        found.append((row.rounds, seconds, flat.sum().item()))
    return found


@pytest.mark.slow
def test_every_synchronisation_is_late(on_ranks):
    for direct, ring in on_ranks(3, lateness):
        assert [direct[::2], ring[::2]] == [(2, 18.0), (4, 18.0)]
        assert direct[1] >= 2 * 0.05
        assert ring[1] >= 4 * 0.05


def test_what_is_found_on_late_links():
    """By hand: α is 1 ms and 9 ms of lateness, β 1 ms for a MB; nothing else counts."""
    setting = links.Setting(4, {2**20: 1}, late_s=0.009)
    network = Network(bandwidth=2**20 * 1e3, latency_s=0.001)
    constants = Fit(network, dict.fromkeys(CONSTANTS, 0.0), (0.0,))
    seconds = {"ring": [0.06, 0.066], "direct": [0.02, 0.022], "parameter server": [0.04, 0.033]}
    found = links.found(setting, {2**20: seconds}, constants)
    assert [row["predicted ms"] for row in found.rows] == pytest.approx([61.5, 21.5, 26.0])
    assert found.figures["direct_vs_ring_9ms_4_1MB"].median == pytest.approx(3.0)
    assert found.figures["direct_vs_parameter_server_9ms_4_1MB"].max == pytest.approx(2.0)
    assert setting.systems == ("ring", "direct", "parameter server")


def measured(config, fields):
    return collectives.measure(config, None, weights=None, **fields)


def test_an_algorithm_of_one_s_own_takes_its_turn(on_ranks):
    class Seated:
        def call(self, task, experiment, **fields):
            assert task == f"{collectives.__name__}:measure"
            return on_ranks.seated(2, measured, fields)

    progress = Progress(say=lambda line: None)
    progress.begin(Part("sizes", 1, 1.0))
    (report,) = collectives.compare(Seated(), progress, {2**10: 1}, 1, ("tests.own_sums:Tree",))
    assert [row["system"] for row in report.rows] == [*collectives.OURS, *NAMED, "Tree"]
    assert report.figures["Tree_over_gloo_vs_gloo_1KB"].min > 0


def test_options_are_for_their_benches(capsys, monkeypatch):
    given = []
    for module in (collectives, codecs):
        monkeypatch.setattr(module, "run", lambda _, **options: given.append(options) or [REPORT])
    assert main(["collectives", "--algorithm", "mine:Tree", "--quick"]) == 0
    assert main(["codecs", "--codec", "sign"]) == 0
    assert given == [dict(quick=True, algorithm="mine:Tree"), dict(quick=False, codec="sign")]
    with pytest.raises(SystemExit):
        main(["codecs", "--algorithm", "mine:Tree"])
    assert "--algorithm: of collectives only, not of codecs" in capsys.readouterr().err
