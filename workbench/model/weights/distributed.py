"""Tensors in the folders of `torch.distributed.checkpoint`, without what might execute.

The metadata of such a folder are a pickle, which torch itself loads as any other. Here it may name
the few classes that metadata consist of, and nothing else; tensors are loaded with `weights_only`,
as torch does, and what is no tensor, which torch would unpickle, is left where it is.
"""

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path, PurePath
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from workbench.model.errors import CheckpointError
from workbench.plan.extension.sealed import imported, loaded

METADATA = ".metadata"


def write(tensors: Mapping[str, Tensor], folder: Path) -> None:
    """Writes tensors into an empty folder, as one process."""
    with warnings.catch_warnings():  # that it is one: it is meant
        warnings.simplefilter("ignore")
        save(dict(tensors), storage_writer=FileSystemWriter(folder), no_dist=True)


_METADATA = "torch.distributed.checkpoint.metadata"
_NAMES = {
    (_METADATA, "Metadata"),
    (_METADATA, "TensorStorageMetadata"),
    (_METADATA, "BytesStorageMetadata"),
    (_METADATA, "ChunkStorageMetadata"),
    (_METADATA, "TensorProperties"),
    (_METADATA, "MetadataIndex"),
    (_METADATA, "StorageMeta"),
    (_METADATA, "_MEM_FORMAT_ENCODING"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
    ("collections", "OrderedDict"),
    ("pathlib", "Path"),
    ("pathlib", "PosixPath"),
    ("pathlib", "PurePosixPath"),
    ("pathlib._local", "PosixPath"),
}
"""What metadata are made of; calling one of these with anything executes nothing else."""


def _find(module: str, name: str) -> Any:
    """What metadata name; whatever else is named is refused.

    Raises:
        CheckpointError: it is nothing that metadata consist of.
    """
    dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
    if (module, name) not in _NAMES and not dtype:
        raise CheckpointError(
            f"it names {module}.{name}, which metadata have no use for, and which might execute"
        )
    return imported(module, name)


class _Reader(FileSystemReader):
    """Torch's own, but for the metadata."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        path = Path(self.path) / METADATA
        try:
            with path.open("rb") as opened:
                found = loaded(opened, _find)
        except CheckpointError as error:
            raise CheckpointError(f"{path} is not loaded: {error}") from None
        except Exception as error:  # whatever a damaged pickle makes of itself
            raise CheckpointError(f"{path} is damaged: {error!r}") from error
        if not isinstance(found, Metadata) or not isinstance(found.storage_data, dict):
            raise CheckpointError(f"{path} holds no metadata of torch.distributed.checkpoint")
        for place in found.storage_data.values():
            if PurePath(place.relative_path).name != place.relative_path:
                raise CheckpointError(f"{path} names {place.relative_path!r}, no file beside it")
        if found.storage_meta is None:
            found.storage_meta = StorageMeta()
        found.storage_meta.load_id = self.load_id
        return found


def read(folder: Path, wanted: Callable[[str], bool]) -> dict[str, Tensor]:
    """The tensors of a folder whose names are wanted, by name.

    Raises:
        CheckpointError: it is damaged, or its metadata name what might execute.
    """
    reader = _Reader(folder)
    held = reader.read_metadata().state_dict_metadata
    state = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in held.items()
        if isinstance(entry, TensorStorageMetadata) and wanted(name)
    }
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            load(state, storage_reader=reader, no_dist=True)
    except (Exception, CheckpointException) as error:  # the latter, torch's, is no Exception
        raise CheckpointError(f"{folder} cannot be read: {error}") from error
    return state
