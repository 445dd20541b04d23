"""A process that starts a cluster and then has something else to do: `notebook.py FOLDER`."""

import sys
from pathlib import Path

from tests.cluster.keeper.keeping import spec
from workbench.cluster.keeper import start

if __name__ == "__main__":
    start(Path(sys.argv[1]), spec(1))
    print("started", flush=True)
    sys.stdin.readline()
