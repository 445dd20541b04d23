"""Weights as others have them: Hugging Face's safetensors, and `torch.distributed.checkpoint`.

    x.safetensors                        one file
    folder/model.safetensors             one file, as `from_pretrained` reads it
    folder/model.safetensors.index.json  several files, and which tensor lies in which
    folder/.metadata, *.distcp           what `torch.distributed.checkpoint.save` writes

Names are those of the module's `state_dict`. Nothing that is read can execute code:
`distributed.py` says how that is so of the last.
"""

import json
import shutil
import uuid
from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import Any, Literal, get_args

from torch import Tensor

from workbench.model.errors import CheckpointError
from workbench.model.weights.files import TensorFile, write_tensors
from workbench.model.weights.pieces import INDEX as OWN_INDEX
from workbench.plan.io.errors import unknown
from workbench.plan.io.files import write_whole

Format = Literal["safetensors", "dcp"]
FORMATS: tuple[Format, ...] = get_args(Format)

MODEL, INDEX = "model.safetensors", "model.safetensors.index.json"
DCP = ".metadata"  # of torch.distributed.checkpoint
MOST_BYTES = 5_000_000_000
"""Of one file, as Hugging Face's tools write them."""


def write_weights(
    tensors: Mapping[str, Tensor], path: Path, format: Format, most_bytes: int = MOST_BYTES
) -> Path:
    """Writes a folder that others read; it is there whole or not at all.

    Raises:
        CheckpointError: the folder is there already, no such format, or it cannot be written.
    """
    if format not in FORMATS:
        raise CheckpointError(unknown("format", str(format), FORMATS))
    if most_bytes < 1:
        raise CheckpointError(f"files have 1 byte or more, got {most_bytes}")
    path = Path(path)
    if path.exists():
        raise CheckpointError(f"{path} is there already; a new folder is written")
    part = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.part")
    try:
        part.mkdir(parents=True)
        if format == "dcp":
            from workbench.model.weights import distributed  # only here: it takes seconds to load

            distributed.write(tensors, part)
        else:
            _write_safetensors(tensors, part, most_bytes)
        part.rename(path)
    except OSError as error:
        raise CheckpointError(f"{path} could not be written: {error}") from error
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return path


def read_weights(path: str | Path, prefix: str = "") -> dict[str, Tensor]:
    """The tensors of a file or folder, by name, in memory of their own.

    Args:
        path: a safetensors file; or a folder with one, with several and their index, or that
            `torch.distributed.checkpoint.save` wrote.
        prefix: what names begin with, as "model."; it is taken off, and other tensors are left out.

    Raises:
        CheckpointError: it is missing, damaged, none of these, or has no tensor of this prefix.
    """
    found = Path(path)
    if not found.exists():
        raise CheckpointError(f"{found} does not exist")
    if (found / DCP).is_file():
        from workbench.model.weights import distributed

        read = distributed.read(found, lambda name: _has(name, prefix))
    else:
        files = _files(found)
        read = {name: files[name].view(name, ()).clone() for name in files if _has(name, prefix)}
    if not read:
        more = f" whose name begins with {prefix!r}" if prefix else ""
        raise CheckpointError(f"{found} has no tensor{more}")
    return {name.removeprefix(prefix): tensor for name, tensor in read.items()}


def _has(name: str, prefix: str) -> bool:
    return name.startswith(prefix) and name != prefix


def _write_safetensors(tensors: Mapping[str, Tensor], folder: Path, most_bytes: int) -> None:
    parts: list[dict[str, Tensor]] = [{}]
    room = most_bytes
    for name, tensor in tensors.items():
        if tensor.nbytes > room and parts[-1]:
            parts.append({})
            room = most_bytes
        parts[-1][name] = tensor.clone()  # tied weights have one memory, which files do not know
        room -= tensor.nbytes
    if len(parts) == 1:
        write_tensors(folder / MODEL, parts[0], {"format": "pt"})
        return
    where: dict[str, str] = {}
    for number, part in enumerate(parts, 1):
        file = f"model-{number:05}-of-{len(parts):05}.safetensors"
        write_tensors(folder / file, part, {"format": "pt"})
        where |= dict.fromkeys(part, file)
    total = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": where}
    write_whole(folder / INDEX, json.dumps(index, indent=2, sort_keys=True) + "\n")


def _files(path: Path) -> dict[str, TensorFile]:
    """The file of each tensor.

    Raises:
        CheckpointError: it is neither, or the index does not fit the files.
    """
    if path.is_file():
        if path.suffix != ".safetensors":
            raise CheckpointError(
                f"{path} is no safetensors file; pickles (.pt, .pth, .bin) are not opened: they "
                "can execute code; safetensors.torch.save_file(module.state_dict(), "
                "'model.safetensors') writes one"
            )
        alone = TensorFile(path)
        return dict.fromkeys(alone.names, alone)
    if (path / OWN_INDEX).is_file():
        raise CheckpointError(
            f"{path} is a checkpoint of this library: train(resume=...) goes on from it, and "
            "export_checkpoint writes its weights for others"
        )
    indexes = sorted(path.glob("*.safetensors.index.json"))
    if not indexes:
        single = sorted(path.glob("*.safetensors"))
        if len(single) == 1:
            return _files(single[0])
        raise CheckpointError(
            f"{path} holds neither one .safetensors file, nor several with an index ({INDEX}), nor "
            "what torch.distributed.checkpoint.save writes"
        )
    try:
        where: Any = json.loads(indexes[0].read_text("utf-8"))["weight_map"]
        named = {str(name): str(file) for name, file in where.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{indexes[0]} cannot be read: {error!r}") from error
    files = {}
    for file in dict.fromkeys(named.values()):
        if PurePath(file).name != file:
            raise CheckpointError(f"{indexes[0]} names {file!r}, which is no file beside it")
        files[file] = TensorFile(path / file)
    for name, file in named.items():
        if name not in files[file].names:
            raise CheckpointError(f"{path / file} has no {name!r}, which the index says it has")
    return {name: files[file] for name, file in named.items()}
