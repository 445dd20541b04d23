"""The initial weights of a job that has none: the assistant makes them, once for all ranks."""

import uuid
from pathlib import Path

from workbench.server.attempt import attempt_folder
from workbench.store import message
from workbench.store.answer import Answer
from workbench.store.errors import ClusterError
from workbench.store.rank_files import RankFiles
from workbench.store.record import JobRecord, Request
from workbench.store.store import Store

TASK = "workbench.engine.calls:initial_weights"


class InitialWeights:
    """Asks the assistant for weights, by a call that is a job like others.

    Args:
        store: of the cluster.
        folder: of the cluster; weights are kept in it.
        assistant: the engine that makes them.
    """

    def __init__(self, store: Store, folder: Path, assistant: int) -> None:
        self._store, self._folder, self._assistant = store, folder, assistant

    def needed(self, whole: JobRecord) -> bool:
        """Whether a job begins with weights that nobody made yet."""
        keywords = message.unpack_keywords(whole.keywords)
        begins = whole.kind == "train" and not keywords.get("resume")
        return begins and "weights" in keywords and keywords["weights"] is None

    def of(self, whole: JobRecord) -> Path | None:
        """The file; None while it is being made.

        Raises:
            ClusterError: it could not be made.
        """
        key = f"weights-{whole.id}"
        number = self._store.meta(key)
        if number is None:
            # Killed between the two: another call is made, which finds the file that the first
            # one made.
            self._store.set_meta(key, str(self._ask(whole)))
            return None
        call = self._store.job(int(number))
        if not call.has_ended:
            return None
        packed = RankFiles(attempt_folder(call.directory, call.attempt), 0).answer
        answer = Answer.unpack(packed) if packed is not None else None
        path = answer.value if answer is not None else None
        if call.state == "finished" and isinstance(path, Path) and path.exists():
            return path
        self._store.set_meta(key, None)
        if call.state == "finished":
            return None  # somebody removed the file: once more
        text = call.error.text if call.error else call.reason
        raise ClusterError(f"the initial weights could not be made: {text}")

    def _ask(self, whole: JobRecord) -> int:
        return self._store.submit(
            Request(
                kind="call",
                name=f"initial weights of {whole.name}",
                task=TASK,
                packed=whole.packed,
                keywords=message.pack_keywords({"directory": self._folder / "weights"}),
                engines=1,
                places=(self._assistant,),
                directory=str(self._folder / "calls" / uuid.uuid4().hex),
                priority=whole.priority,
            )
        )
