"""Torch's tensor parallelism of a language model, as its own tutorial has it.

Attention is cut by heads and MLPs in pairs of columns and rows, over all ranks; the table of tokens
by its rows; scores by the vocabulary, and the loss is computed over the cut scores.

    plain       every rank has all tokens of all rows wherever nothing is cut
    sequence    there every rank has some tokens of each sequence: an all-reduce becomes a
                reduce-scatter and an all-gather (Korthikanti et al. 2022, arXiv:2205.05198)
"""

from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

_TOKENS = Shard(1)


def language_model(module: nn.Module, ranks: int, *, sequence: bool) -> nn.Module:
    """`nets.GPT`, cut over all ranks.

    Args:
        module: the whole model, with its weights.
        ranks: the number of ranks.
        sequence: whether norms read some tokens of each sequence.
    """
    mesh = init_device_mesh(next(module.parameters()).device.type, (ranks,))
    between = _TOKENS if sequence else Replicate()
    styles: dict[str, ParallelStyle] = {
        "table": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
        "head": ColwiseParallel(input_layouts=between, use_local_output=False),
    }
    for name, _ in module.get_submodule("blocks").named_children():
        block = f"blocks.{name}"
        styles |= {f"{block}.attention.{part}": ColwiseParallel() for part in "qkv"}
        styles[f"{block}.attention.o"] = RowwiseParallel(output_layouts=between)
        styles[f"{block}.up"] = ColwiseParallel(input_layouts=between)
        styles[f"{block}.down"] = RowwiseParallel(output_layouts=between)
        if sequence:
            styles[f"{block}.attention"] = PrepareModuleInput(
                input_layouts=(_TOKENS,), desired_input_layouts=(Replicate(),)
            )
            styles |= {f"{block}.{norm}": SequenceParallel() for norm in ("before", "between")}
    if sequence:
        styles["norm"] = SequenceParallel()
    return parallelize_module(module, mesh, styles)
