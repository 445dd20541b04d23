"""A process that starts a cluster and then has something else to do: `notebook.py FOLDER`."""

import sys
from pathlib import Path

from tests.supervisor.supervising import spec
from workbench.supervisor import start

if __name__ == "__main__":
    start(Path(sys.argv[1]), spec(1))
    print("started", flush=True)
    sys.stdin.readline()
