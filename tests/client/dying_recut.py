"""A session of which one rank is killed in the middle of its first re-cut, as by the system."""

import os
import signal
from pathlib import Path

import pytest

from workbench.train.loop import session
from workbench.train.reshard import reshard as recut

VICTIM = 1
train_well = session.train


def train(*, seat, directory: Path, **given) -> session.Outcome:
    """Rank 1 dies when it has packed what it sends; the next session lives."""
    marker = directory / "one has died"
    exchange = recut.exchange_parts

    def die(*args, **keywords):
        if seat.rank == VICTIM and not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return exchange(*args, **keywords)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recut, "exchange_parts", die)
        return train_well(seat=seat, directory=directory, **given)
