"""Initial weights: a file that every rank reads its slices from.

One process builds the whole model once and writes it; ranks never hold the whole. The values depend
on the model and the seed alone: not on the plan, nor on the number of ranks.
"""

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

from workbench.model.build import build
from workbench.model.errors import CheckpointError, ModelError
from workbench.model.weights.files import TORCH_DTYPES, write_tensors
from workbench.model.weights.slices import WeightsFile, expect
from workbench.plan.graph.graph import Graph, Weight
from workbench.plan.io.errors import unknown


def initialize(
    graph: Graph,
    seed: int,
    directory: Path,
    *,
    module: nn.Module | None = None,
    given: Mapping[str, Tensor] | None = None,
) -> Path:
    """Writes a model's initial values as one safetensors file; an intact one is used again.

    A torchvision model gets torch's own initial values under `seed`. A user's module gets the
    values that it has, in float32. Two callers at once are safe: each writes a file of its own,
    with the same bytes, and renames it.

    Args:
        graph: the traced model.
        seed: the seed of the random values.
        directory: the folder that the file is written to.
        module: the user's module, if the graph was traced from one.
        given: values instead of those, by the names of the model's `state_dict`.

    Returns:
        The path of the file, named by model, fingerprint, and seed or contents.

    Raises:
        ModelError: a module is needed and missing, or differs from the one that was traced, also
            in what it trains.
        CheckpointError: the values given are another model's; or the file cannot be written, for
            instance since the disk is full.
    """
    weights = [weight for layer in graph.layers for weight in layer.weights]
    if given is not None:
        values = _given(given, weights, graph)
        others = [weight for weight in weights if not weight.persistent]
        if others:
            with _seeded(seed):
                whole = build(graph.source) if module is None else module
            values |= _values(whole, others, graph)
        return _kept(values, weights, graph, directory)
    if module is None:
        path = directory / f"{graph.source.name}-{graph.fingerprint}-seed{seed}.safetensors"
        if _intact(path, weights):
            return path
        with _seeded(seed):
            module = build(graph.source)
        write_tensors(path, _values(module, weights, graph))
        return path
    return _kept(_values(module, weights, graph), weights, graph, directory)


def _kept(
    values: Mapping[str, Tensor], weights: list[Weight], graph: Graph, directory: Path
) -> Path:
    """The file of values that no seed tells."""
    path = directory / f"{graph.source.name}-{graph.fingerprint}-{_digest(values)}.safetensors"
    if not _intact(path, weights):
        write_tensors(path, values)
    return path


def _given(given: Mapping[str, Tensor], weights: list[Weight], graph: Graph) -> dict[str, Tensor]:
    """The values given, by their names in the graph.

    Raises:
        CheckpointError: one is missing, too many, or of another shape; the first are named.
    """
    values, wrong, used = {}, [], set()
    for weight in (weight for weight in weights if weight.persistent):
        names = [name for name in (weight.name, *weight.aliases) if name in given]
        used.update(names)
        if not names:
            wrong.append(unknown("tensor", weight.name, given))
        elif tuple(given[names[0]].shape) != weight.shape:
            shape = tuple(given[names[0]].shape)
            wrong.append(f"{weight.name!r} has shape {shape}, the model's has {weight.shape}")
        else:
            values[weight.name] = given[names[0]].to(dtype=TORCH_DTYPES[weight.dtype])
    wrong += [f"the model has no {name!r}" for name in given if name not in used]
    if wrong:
        more = f"; and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise CheckpointError(
            f"these weights are not those of {graph.source.name}: {'; '.join(wrong[:3])}{more}"
        )
    return values


def _values(module: nn.Module, weights: list[Weight], graph: Graph) -> dict[str, Tensor]:
    """The module's tensors by their names in the graph."""
    held: Mapping[str, Tensor] = {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }
    values = {}
    for weight in weights:
        tensor = held.get(weight.name)
        if tensor is None or tuple(tensor.shape) != weight.shape:
            found = "no such tensor" if tensor is None else f"shape {tuple(tensor.shape)}"
            raise ModelError(
                f"the {type(module).__name__} given is not the {graph.source.name} that was "
                f"traced: {weight.name!r} of shape {weight.shape} is expected, it has {found}"
            )
        _show_unchanged(weight, tensor, graph)
        values[weight.name] = tensor.detach().to(dtype=TORCH_DTYPES[weight.dtype])
    return values


def _show_unchanged(weight: Weight, tensor: Tensor, graph: Graph) -> None:
    """Checks that a parameter is as trainable as when its model was traced.

    Raises:
        ModelError: it was frozen since, or is not any more.
    """
    if not isinstance(tensor, nn.Parameter):
        return
    frozen = graph.source.frozen
    thawed = frozen is not None and weight.name in frozen and tensor.requires_grad
    if thawed or (weight.trainable and not tensor.requires_grad):
        raise ModelError(
            f"requires_grad of {weight.name!r} is {tensor.requires_grad}, and was "
            f"{not tensor.requires_grad} when {graph.source.name} was traced: trace it again, and "
            "make the plan of that graph"
        )


def _intact(path: Path, weights: list[Weight]) -> bool:
    try:
        expect(WeightsFile(path), weights, of=str(path))
    except CheckpointError:
        return False
    return True


def _digest(values: Mapping[str, Tensor]) -> str:
    content = hashlib.blake2b(digest_size=6)
    for tensor in values.values():
        elements = tensor.cpu().contiguous().reshape(-1).view(torch.uint8)
        content.update(elements.numpy().data)
    return content.hexdigest()


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Sets the seed of torch's CPU generator, and restores its state afterwards."""
    state = torch.get_rng_state()
    torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        torch.set_rng_state(state)
