"""A session of which one rank is killed in the middle of its first re-cut, as by the system."""

import os
import signal
from pathlib import Path

import pytest

from workbench.train.run import loop as session
from workbench.train.run import reshard as resharding

VICTIM = 1
train_well = session.train


def train(*, config, directory: Path, **given) -> session.TrainingOutcome:
    """Rank 1 dies when it has packed what it sends; the next session lives."""
    marker = directory / "one has died"
    exchange = resharding.exchange_parts

    def die(*args, **keywords):
        if config.rank == VICTIM and not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return exchange(*args, **keywords)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(resharding, "exchange_parts", die)
        return train_well(config=config, directory=directory, **given)
