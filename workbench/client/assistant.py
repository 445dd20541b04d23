"""Work that is done once for all ranks, on the whole model, by an engine that is no rank.

Not in the notebook's process: models draw their initial weights from torch's global random
state, which other threads there may use at the same time.
"""

import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from workbench.client.leases import Dispatch
from workbench.model.errors import ModelError
from workbench.model.weights import initialize
from workbench.plan.experiment import Experiment
from workbench.store.errors import EngineDied, RankError, RunError

WEIGHTS = "workbench.engine.calls:initial_weights"
REFERENCE = "workbench.train.verify.reference:write_reference"


class Assistant:
    """An engine of its own, with all cores.

    Args:
        dispatch: calls it.
        index: which engine it is.
        folder: of the cluster; files are made there.
    """

    def __init__(self, dispatch: Dispatch, index: int, folder: Path) -> None:
        self._dispatch, self._index, self._folder = dispatch, index, folder
        self.directory = folder / "weights"

    def values_of(self, experiment: Experiment, module: nn.Module | None) -> Path | None:
        """Writes the values of a user's own module, here and now; None for a model by name.

        Raises:
            ModelError: the module is missing, or another one than was traced.
        """
        graph = experiment.plan.graph
        if graph.source.kind != "module":
            return None
        if module is None:
            name = graph.source.name
            raise ModelError(
                f"the values of {name} are in your module: give it, module={name}(...)"
            )
        return initialize(graph, experiment.seed, self.directory, module=module)

    def weights(self, experiment: bytes) -> Path:
        """Writes the model's initial weights, once for each model and seed."""
        found = self._perform(
            WEIGHTS, experiment, {"directory": self.directory}, "the initial weights"
        )
        assert isinstance(found, Path)
        return found

    def reference(
        self, experiment: bytes, weights: Path, loss: bytes | None = None
    ) -> tuple[Path, Path]:
        """Writes what the unsplit model computes, and the weights that it starts from.

        Args:
            experiment: packed.
            weights: the initial weights.
            loss: the user's own, pickled; None: cross-entropy.

        Returns:
            The weights and the results; the caller removes both.
        """
        number = uuid.uuid4().hex  # other notebooks verify, too
        start = self._folder / f"start-{number}.safetensors"
        path = self._folder / f"reference-{number}.safetensors"
        self._perform(
            REFERENCE,
            experiment,
            {"weights": weights, "start": start, "path": path, "loss": loss},
            "the unsplit model's results",
        )
        return start, path

    def _perform(
        self, task: str, experiment: bytes, keywords: Mapping[str, Any], product: str
    ) -> Any:
        try:
            return self._dispatch.called(task, experiment, [self._index], keywords)[0]
        except RankError as error:
            raise RunError(
                f"{product} could not be made: {error.kind}: {error.text}\n\n"
                f"{error.remote_traceback}"
            ) from None
        except EngineDied as error:
            raise RunError(
                f"{product} could not be made, perhaps for want of memory: the process "
                f"that makes them {error.death}"
            ) from None
