"""A job server that greets engines, and can do nothing else: `python -m ... FOLDER`."""

import sys
import time
from pathlib import Path

from workbench.server.engine_calls import Calls
from workbench.store.cluster_store import STORE
from workbench.store.store import Store

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    store = Store(folder / STORE)
    (folder / "greeter").write_text("here")
    calls = Calls(folder, lambda _direction, _bytes, _job: None)
    known: set[int] = set()
    asked = {}
    while True:
        for engine_id in calls.registered - known:
            known.add(engine_id)
            asked[engine_id] = calls.call(engine_id, "introduce")
        # Of those that have died meanwhile none ever answers.
        for engine_id in [each for each, answer in asked.items() if answer.ready()]:
            pid = asked.pop(engine_id).get()
            for engine in store.engines():
                if engine.pid == pid:
                    store.set_engine(engine.index, engine_id=engine_id, state="idle")
        time.sleep(0.02)
