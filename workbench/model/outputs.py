"""What a model returns, and what each of it is for."""

from collections.abc import Sequence
from typing import Any

import torch.fx
from torch import Tensor
from torch.fx import Node
from torch.utils import _pytree as pytree

from workbench.model.errors import ModelError, TraceError
from workbench.plan.graph import ROLES

_REMEDY = (
    'say what each is for: wb.trace(module, outputs=("prediction", "unused")); '
    f"roles are {', '.join(map(repr, ROLES))}"
)


def checked_roles(given: Sequence[str] | None) -> tuple[str, ...] | None:
    """The declared roles of what a model returns; None: nothing was declared.

    Raises:
        ModelError: an unknown role, or not exactly one prediction.
    """
    if given is None:
        return None
    roles = tuple(given) if not isinstance(given, str) else (given,)
    if any(role not in ROLES for role in roles) or roles.count("prediction") != 1:
        raise ModelError(
            f"outputs says what each returned tensor is for, one of {', '.join(map(repr, ROLES))}, "
            f"and exactly one is the prediction; got {given!r}"
        )
    return roles


def known_roles(graph: torch.fx.Graph) -> tuple[str, ...]:
    """Those of torchvision's classifiers: the prediction, then auxiliary heads."""
    returned = next(node for node in graph.nodes if node.op == "output").args[0]
    listed = returned if isinstance(returned, list | tuple) else [returned]
    count = sum(item is not None for item in listed)
    return ("prediction", *["auxiliary"] * (count - 1))


def keep_outputs(
    graph: torch.fx.Graph, roles: tuple[str, ...] | None, *, training: bool = True
) -> tuple[str, ...]:
    """Has a traced graph return what is trained on: the prediction first, then auxiliary heads.

    Args:
        graph: of a `ValueTracer`, with its values.
        roles: what was declared; None: nothing, so that one tensor is expected.
        training: whether the graph is of training mode; in evaluation a model may return the
            prediction alone.

    Returns:
        The role of each tensor that the model returns.

    Raises:
        TraceError: the model returns something else than tensors of one row for each sample, or
            other ones than were declared.
    """
    output = next(node for node in graph.nodes if node.op == "output")
    returned = output.args[0]
    listed = returned if isinstance(returned, list | tuple) else [returned]
    found = [item for item in listed if item is not None]
    if not found:
        raise TraceError("the model returns nothing")
    for item in found:
        if not isinstance(item, Node) or not isinstance(item.meta["values"][0], Tensor):
            raise TraceError(
                f"the model returns {_described(returned)}; return the predictions, one "
                "tensor, or a tuple of tensors and say what each is for"
            )
    if roles is None or (not training and len(found) == 1):
        roles = ("prediction",)
    if len(found) != len(roles):
        shapes = ", ".join(str(item.meta["shape"]) for item in found)
        declared = f"{len(roles)} declared" if len(roles) > 1 else "nothing says which is trained"
        raise TraceError(
            f"the model returns {len(found)} tensors, of shapes {shapes} for each sample, and "
            f"{declared}: {_REMEDY}"
        )
    chosen = [item for role in ROLES[:2] for item, r in zip(found, roles, strict=True) if r == role]
    for item in chosen:
        if item.op == "placeholder" or item.meta["rows"] != 1 or not item.meta["shape"]:
            raise TraceError(
                f"the model returns {item.name!r}, which has {item.meta['rows']} rows of shape "
                f"{item.meta['shape']} for each sample; predictions are one row of scores"
            )
    if chosen != found:
        output.args = (tuple(chosen) if len(chosen) > 1 else chosen[0],)
    return roles


def _described(returned: Any) -> str:
    if isinstance(returned, dict):
        return f"a dict with {', '.join(map(repr, returned))}"
    kinds = {type(leaf).__name__ for leaf in pytree.tree_leaves(returned)}
    return f"a {type(returned).__name__} of {', '.join(sorted(kinds))}"
