"""Ranks that hold the same piece of a weight hold the same bits: looked at now and then.

Nothing that travels keeps them equal. Replicas get the same sums and move by them alike; inside a
group that computes a layer in `duplicate`, every rank has its own gradient of the same numbers.
Where one rounds otherwise, with other threads, another processor or library, or where memory is
damaged, they part without a word, and what is trained is no longer one model.

Each rank takes a digest of each weight, some 62 bits that change with any of its bits, and all
digests go to all ranks: 8 bytes a weight and rank. A run does it after the first step, before
evaluations and checkpoints, and at the end, outside of what it times.
"""

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from workbench.comm.collectives import all_gather
from workbench.comm.groups.group import Group
from workbench.layers.cut_model import CutModel
from workbench.plan.experiment.sync import AnySync
from workbench.plan.extension.extension import name_of
from workbench.plan.extension.user_object import Own
from workbench.plan.placement.placement import Shard

_WORD = 8  # bytes
_CHUNK = 2**17  # words: a chunk and its factors stay in a core's cache
_STEP = 6364136223846793005  # odd, so that no bit of earlier chunks is lost
_NAMED = 3  # weights, in an error
_SAID_BYTES = 160  # of what a rank computes with
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class ReplicasDiffer(RuntimeError):
    """Ranks that hold the same piece of a weight do not hold the same bits.

    Args:
        message: the weights and ranks that differ, and what to look at.
        layer: the first layer in which it was seen.
        ranks: the ranks that differ from the most.
    """

    def __init__(self, message: str, layer: str, ranks: tuple[int, ...]) -> None:
        super().__init__(message)
        self.layer, self.ranks = layer, ranks


def check_equal(model: CutModel, everyone: Group, done: int, sync: AnySync) -> None:
    """Compares all weights over the ranks that hold the same piece; every rank calls it.

    Raises:
        ReplicasDiffer: some ranks hold other bits; raised on all.
    """
    placements = model.placements
    names = [name for name, placed in placements.items() if placed.trainable]
    if everyone.size == 1 or not names:
        return
    pieces = model.pieces()
    mine = digests([pieces[name] for name in names])
    one_each = Shard(0, (1,) * everyone.size)
    every = all_gather(mine[None], one_each, everyone, layer="equality").tolist()
    found = {}
    for index, name in enumerate(names):
        k = placements[name].group_size
        cut = isinstance(placements[name].placement, Shard)
        apart = _apart([(rank % k if cut else 0, every[rank][index]) for rank in everyone.ranks])
        if apart:
            found[name] = apart
    if found:
        said = _said_by_all(everyone, pieces[names[0]].device)
        raise _error(model, found, said, done, sync)


@torch.no_grad()
def digests(tensors: Sequence[Tensor]) -> Tensor:
    """[len(tensors)] int64 on the host: of each, its bits and where they are; 0 of an empty one."""
    factors: dict[torch.device, Tensor] = {}
    found = []
    for tensor in tensors:
        if tensor.device not in factors:
            drawn = torch.Generator().manual_seed(0)
            numbers = torch.randint(-(2**63), 2**63 - 1, (_CHUNK,), generator=drawn) | 1
            factors[tensor.device] = numbers.to(tensor.device)
        found.append(_digest(tensor, factors[tensor.device]))
    return torch.stack([each.cpu() for each in found])


def _digest(tensor: Tensor, factors: Tensor) -> Tensor:
    """A sum of all words, each with a factor of its own place; sums go round at 2**64."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    flat = tensor.detach().contiguous().view(-1).view(_INTEGERS[tensor.itemsize])
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for part in flat.split(_CHUNK * _WORD // flat.itemsize):
        words = _words(part)
        total = total * _STEP + (words * factors[: len(words)]).sum()
    return total


def _words(part: Tensor) -> Tensor:
    """The same bytes as 64-bit words; the last is filled up with zeros."""
    each = _WORD // part.itemsize
    if len(part) % each:
        part = torch.cat([part, part.new_zeros(-len(part) % each)])
    elif part.storage_offset() % each:
        part = part.clone()  # torch views words only where they are aligned
    return part.view(torch.int64)


def _apart(held: Sequence[tuple[int, int]]) -> tuple[int, ...]:
    """The ranks that hold something else than most holders of their piece; of as many, the later.

    Args:
        held: the piece that each rank has, and its digest.
    """
    apart = []
    for piece in {piece for piece, _ in held}:
        of_piece = {rank: digest for rank, (own, digest) in enumerate(held) if own == piece}
        most, _ = Counter(of_piece.values()).most_common(1)[0]
        apart += [rank for rank, digest in of_piece.items() if digest != most]
    return tuple(sorted(apart))


def _said_by_all(everyone: Group, device: torch.device) -> list[str]:
    said = (
        f"{_counted(torch.get_num_threads(), 'thread')}, torch {torch.__version__}, "
        f"{torch.backends.cpu.get_cpu_capability()}, {device.type}"
    )
    if device.type == "cuda":
        said = f"{said} ({torch.cuda.get_device_name(device)})"
    text = said.encode()[:_SAID_BYTES].ljust(_SAID_BYTES)
    mine = torch.tensor([list(text)], dtype=torch.uint8)
    every = all_gather(mine, Shard(0, (1,) * everyone.size), everyone, layer="equality")
    return [bytes(row.tolist()).decode(errors="replace").strip() for row in every]


def _error(
    model: CutModel,
    found: dict[str, tuple[int, ...]],
    said: Sequence[str],
    done: int,
    sync: AnySync,
) -> ReplicasDiffer:
    homes = {w.name: layer.name for layer in model.plan.graph.layers for w in layer.weights}
    first, ranks = next(iter(found.items()))
    others = [name for name in found if name != first]
    more = ""
    if others:
        rest = f" and {len(others) - _NAMED} more" if len(others) > _NAMED else ""
        more = f"; likewise {', '.join(map(repr, others[:_NAMED]))}{rest}"
    kinds = {text: [r for r, other in enumerate(said) if other == text] for text in said}
    with_what = "; ".join(f"{_listed(each)}: {text}" for text, each in kinds.items())
    return ReplicasDiffer(
        f"{first!r} of layer {homes[first]!r} has other bits on {_listed(ranks)} than on the other "
        f"ranks that hold the same piece, after {_counted(done, 'step')}{more}. {_of_own(sync)}"
        "Perhaps some ranks round otherwise, or something overwrote it. They compute with: "
        f"{with_what}. Give ranks of a group the same number of threads, kind of processor and "
        "version of torch (on GPUs, torch.use_deterministic_algorithms(True)); of replicas, "
        "shard_optimizer=True has each weight moved by one rank, for all",
        homes[first],
        ranks,
    )


def _of_own(sync: AnySync) -> str:
    """Returns a sentence on the user's own algorithm, codec and strategy; "": there is none."""
    algorithm, codec = sync.summing
    parts = (algorithm, getattr(codec, "own", None), getattr(sync, "given", None))
    if not (own := [name_of(part) for part in parts if isinstance(part, Own)]):
        return ""
    names = " or ".join(map(repr, own))
    return f"Perhaps your own {names} gives ranks different bits, as wb.check_extension would say. "


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'s' * (count != 1)}"


def _listed(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
