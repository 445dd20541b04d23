"""Steps as ranks with GPUs of their own take them, over NCCL, whose place gloo takes.

Nothing is in shared memory then, and what is sent lies where a rank computes. Of each tensor that
reaches the library it is seen that NCCL would take it.
"""

from functools import partial
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from tests.oracle.cases import Case, Cut, Run
from tests.oracle.comparing import judged
from tests.oracle.test_oracle import PLAIN
from tests.oracle.written import WRITTEN
from workbench.comm.groups import world

TAKEN = {
    torch.float64, torch.float32, torch.float16, torch.bfloat16,
    torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool,
}  # fmt: skip
CALLS = ("all_reduce", "all_to_all_single", "broadcast", "batch_isend_irecv")
CHOSEN = {
    "divided tokens": WRITTEN["divided tokens"],
    "a server": WRITTEN["divided tokens, a server"],
    "pipelined, resumed": WRITTEN["divided tokens, resumed, pipelined"],
    "a cut vocabulary": WRITTEN["next tokens, the vocabulary cut"],
    "from one plan to another": WRITTEN["divided tokens, from rows to tokens"],
    "batch norm, dropout, evaluation": Case(PLAIN, Cut(2), Run(evaluate_every=1)),
}


def as_on_gpus(config, function, *args):
    """The function's answer, where ranks say that each has a GPU of its own."""
    seen = []

    def watched(call, *given, **named):
        for one in [*given, *named.values()]:
            for each in one if isinstance(one, list) else [one]:
                tensor = getattr(each, "tensor", each)
                if isinstance(tensor, torch.Tensor):
                    seen.append(tensor)
                    if tensor.dtype not in TAKEN or not tensor.is_contiguous():
                        raise TypeError(f"NCCL takes no {tensor.dtype} of {tensor.stride()}")
        return call(*given, **named)

    def joined(backend, *given, join=dist.init_process_group, **named):
        if backend != "nccl":
            raise ValueError(f"ranks with GPUs of their own meet over {backend}")
        join("gloo", *given, **named)

    calls = {name: partial(watched, getattr(dist, name)) for name in CALLS}
    with (
        patch.multiple(dist, init_process_group=joined, **calls),
        patch.object(world, "_device_name", lambda _device: f"gpu {config.rank}"),
    ):
        answer = function(config, *args)
    if not seen and config.world_size > 1:
        raise ValueError("nothing reached the library")
    return answer


@pytest.mark.slow
@pytest.mark.parametrize("name", CHOSEN)
def test_a_step_over_nccl_is_that_of_one_process(on_ranks, name):
    def seated(size, function, *args, **limits):
        return on_ranks.seated(size, as_on_gpus, function, *args, **limits)

    verdict = judged(CHOSEN[name], seated)
    assert verdict.what == "equal", verdict.why
