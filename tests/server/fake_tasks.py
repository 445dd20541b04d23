"""What ranks of the tests do: they meet at files, and sum numbers instead of gradients."""

import fcntl
import json
import os
import time
from pathlib import Path

from workbench.plan.experiment.metrics import COLUMNS
from workbench.store.messages import TrainingOutcome

STEP_S = 0.01


class CommTimeout(RuntimeError):
    """As the ranks' own, which would load torch."""


def train(experiment, config, directory, control, emit, resume=None, weights=None, **how):
    """`steps` steps; how: `every` (steps between checkpoints), `step_s`, and faults by step."""
    steps, every = how.get("steps", 30), how.get("every", 5)
    value, first = _load(resume) if resume else (1.0, 0)
    with _alone(directory, config, how):
        path = None
        for step in range(first, steps):
            time.sleep(how.get("step_s", STEP_S))
            _fault(config, step, how)
            _meet(directory, config, step)
            value = (value * 1103.0 + step) % 10007.0
            emit(_row(step, config.rank, value))
            stop = _agreed(directory, config, step, control.stop_requested)
            done = step + 1
            if stop or done == steps or done % every == 0:
                path = _save(directory, done, value) if config.rank == 0 else path
                _meet(directory, config, f"saved-{done}")
            if stop and done < steps:
                return TrainingOutcome("stopped", done, str(path))
        return TrainingOutcome("finished", max(steps, first), str(path), {"value": value})


def value_after(steps: int) -> float:
    """What an uninterrupted run ends with."""
    value = 1.0
    for step in range(steps):
        value = (value * 1103.0 + step) % 10007.0
    return value


def answer(experiment, config=None, **keywords):
    """A call that returns at once."""
    return {"rank": config.rank if config else None, **keywords}


def sleep(experiment, config=None, seconds=60.0):
    """A call that takes long."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        time.sleep(0.01)


def fail(experiment, config, **_):
    """A rank that raises, while the others wait for it."""
    if config.rank == 1:
        raise ValueError("no room")
    time.sleep(60)


def _fault(config, step, how):
    if step == how.get("dies_at") and config.rank == how.get("who", 0):
        os.kill(os.getpid(), 9)
    if step == how.get("raises_at") and config.rank == how.get("who", 0):
        raise ValueError("no room")
    if step == how.get("sleeps_at") and config.rank == how.get("who", 0):
        time.sleep(60)


class _alone:
    """Holds a job's folder for one world at a time: a second one would be an attempt too many."""

    def __init__(self, directory: Path, config, how) -> None:
        self.directory, self.config = directory, config
        self.file = (directory / f"alone-{config.rank}").open("a")
        try:
            fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            (directory / "twice").touch()
        with (directory / "begun").open("a") as log:
            log.write(f"{config.prefix} {config.rank}\n")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.file.close()


def _meet(directory, config, what):
    """Returns when all ranks of this world have come here."""
    meeting = directory / "meetings" / config.prefix
    meeting.mkdir(parents=True, exist_ok=True)
    (meeting / f"{what}-{config.rank}").touch()
    deadline = time.monotonic() + config.timeout_s
    while not all((meeting / f"{what}-{rank}").exists() for rank in range(config.world_size)):
        if time.monotonic() > deadline:
            raise CommTimeout(f"not all came to {what}")
        time.sleep(0.002)


def _agreed(directory, config, step, stop):
    meeting = directory / "meetings" / config.prefix
    if stop:
        (meeting / f"stop-{step}").touch()
    _meet(directory, config, f"agreed-{step}")
    return (meeting / f"stop-{step}").exists()


def _save(directory, step, value):
    part, whole = directory / f"step-{step:06d}.tmp", directory / f"step-{step:06d}"
    part.mkdir(exist_ok=True)
    header = json.dumps({"value": {"dtype": "F64", "shape": [], "data_offsets": [0, 8]}}).encode()
    packed = len(header).to_bytes(8, "little") + header + repr(value).encode()[:8].ljust(8)
    (part / "rank-00000.safetensors").write_bytes(packed)
    (part / "index.toml").write_text(
        '[tensors.value]\npieces = [{ file = "rank-00000.safetensors" }]\n'
    )
    (part / "value").write_text(repr(value))
    (part / "checkpoint.toml").write_text("")
    if not whole.exists():
        part.rename(whole)
    return whole


def _load(path):
    return float((path / "value").read_text()), int(path.name.removeprefix("step-"))


def _row(step, rank, value):
    row = dict.fromkeys(COLUMNS, 0.0)
    return {**row, "step": step, "rank": rank, "time": time.time(), "loss": value}
