"""What tests of runs have in common: a small net's weights, and whole sessions."""

import pytest

from tests.train import small
from tests.train.runs import session
from workbench.model.weights.initial import initialize
from workbench.train.run.requests import RunRequests


@pytest.fixture(scope="session")
def weights(tmp_path_factory):
    """The initial weights of the small net."""
    return initialize(small.GRAPH, 0, tmp_path_factory.mktemp("weights"), module=small.net())


@pytest.fixture
def whole_run(on_ranks, tmp_path):
    """Runs sessions, each in a folder of its own; -> the folder, all ranks' rows and outcomes."""

    def whole_run(experiment, weights, resume=None, stop_after=None, carried_out=()):
        directory = tmp_path / f"run{len(list(tmp_path.iterdir()))}"
        directory.mkdir()
        requests = RunRequests(directory)
        for request, done in carried_out:
            requests.carry_out(requests.submit(request), done)
        args = experiment, weights, directory, resume, stop_after
        answers = on_ranks.seated(experiment.plan.world_size, session, *args)
        return directory, *map(list, zip(*answers, strict=True))

    return whole_run
