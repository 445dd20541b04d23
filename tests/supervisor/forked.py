"""What an engine is in the tests of templates: it tells what it is, and ends with a status."""

import json
import os
import sys

import numpy

print(
    json.dumps(
        {
            "parent": os.getppid(),
            "leads": os.getsid(0) == os.getpid(),
            "engine": os.environ["WORKBENCH_ENGINE"],
            "template": os.environ.get("WORKBENCH_TEMPLATE"),
            "arguments": sys.argv[1:],
            "drawn": numpy.random.rand(),
        }
    ),
    flush=True,
)
sys.exit(7)
