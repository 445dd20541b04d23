"""A run's weights for others: Hugging Face's safetensors, or `torch.distributed.checkpoint`."""

from pathlib import Path

from workbench.client.run.run import Run
from workbench.model.weights.exchange import MOST_BYTES, Format, write_weights
from workbench.plan.experiment.experiment import Experiment
from workbench.store.errors import ClusterError
from workbench.store.run_folder import EXPERIMENT
from workbench.train.checkpoint.checkpoint import StateDict, latest, state_dict


def export_checkpoint(
    source: Run | str | Path,
    path: str | Path,
    *,
    format: Format = "safetensors",
    ema: bool = False,
    most_bytes: int = MOST_BYTES,
) -> Path:
    """Writes the weights and buffers of a checkpoint, whole, as others read them.

    Names are those of the module's `state_dict`: `module.load_state_dict` takes what
    `safetensors.torch.load_file` reads, and `torch.distributed.checkpoint.load` fills
    `module.state_dict()`. `cluster.train(weights=path)` begins with them.

    Args:
        source: a run, whose newest checkpoint is meant; its folder; or a checkpoint's.
        path: the folder to write, which must not be there yet.
        format: "safetensors" (model.safetensors, or several files with an index), or "dcp"
            (`torch.distributed.checkpoint`).
        ema: whether parameters have their averaged values.
        most_bytes: the bytes of one safetensors file.

    Returns:
        The folder.

    Raises:
        ClusterError: there is no checkpoint.
        CheckpointError: it is damaged, or has no averages; or the folder cannot be written.
    """
    return write_weights(_state(source, ema), Path(path), format, most_bytes)


def _state(source: Run | str | Path, ema: bool) -> StateDict:
    if isinstance(source, Run):
        return source.state_dict(ema=ema)
    folder = Path(source)
    checkpoint = latest(folder) or folder
    if not (checkpoint / EXPERIMENT).is_file():
        raise ClusterError(f"{folder} is neither a run's folder nor a checkpoint's")
    graph = Experiment.load(checkpoint / EXPERIMENT).plan.graph
    return state_dict(checkpoint, graph, ema=ema)
