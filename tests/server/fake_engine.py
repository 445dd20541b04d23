"""An engine without ipyparallel and torch: takes its calls from a folder.

`python -m tests.server.fake_engine FOLDER`; the calls are real ones otherwise, and
`run` is the engines' own.
"""

import os
import pickle
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

from workbench.engine.calls import run


def main(folder: Path) -> None:
    parent, pid = os.getppid(), os.getpid()
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    inbox = folder / "inbox" / str(pid)
    inbox.mkdir(parents=True)
    (folder / "arrivals" / str(pid)).touch()
    while os.getppid() == parent:
        for path in sorted(inbox.glob("*.call")):
            given = pickle.loads(path.read_bytes())
            path.unlink()
            with suppress(KeyboardInterrupt):
                run(given)
        time.sleep(0.005)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
