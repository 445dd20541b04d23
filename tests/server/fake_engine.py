"""An engine without ipyparallel and torch: takes its calls from a folder.

`python -m tests.server.fake_engine FOLDER INDEX`; the calls are real ones otherwise, and
`run` is the engines' own.
"""

import json
import os
import pickle
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

from workbench.engine.calls import assume_identity, run


def main(folder: Path, index: int) -> None:
    parent, pid = os.getppid(), os.getpid()
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    inbox = folder / "inbox" / str(pid)
    inbox.mkdir(parents=True)
    introduce(folder, index)
    while os.getppid() == parent:
        for path in sorted(inbox.glob("*.call")):
            function, arguments = pickle.loads(path.read_bytes())
            path.unlink()
            if function is assume_identity:  # without torch
                introduce(folder, arguments[0])
            else:
                assert function is run
                with suppress(KeyboardInterrupt):
                    run(*arguments)
        time.sleep(0.005)


def introduce(folder: Path, index: int) -> None:
    text = json.dumps({"index": index, "pid": os.getpid()})
    part = folder / "arrivals" / f".{os.getpid()}.part"
    part.write_text(text)
    part.replace(folder / "arrivals" / str(os.getpid()))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
