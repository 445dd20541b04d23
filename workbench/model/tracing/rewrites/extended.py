"""Batch norms and embeddings in modules that extend torch's: with an activation, or a factor.

Such a module calls `torch.nn.functional.batch_norm` with its own parameters and statistics, or
`embedding` with its own table. That call is what the `forward` of torch's own class does, and is
recorded as a call of that class: a batch norm, whose statistics a plan can average, synchronize and
save; an embedding, whose table it can cut.
"""

import inspect
from typing import Any

import torch.nn.functional as F
from torch import nn
from torch.fx import Node
from torch.nn.modules.batchnorm import _BatchNorm

from workbench.model.errors import TraceError

_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_CLASSES = (*_NORMS, nn.Embedding)
_TENSORS = ("running_mean", "running_var", "weight", "bias")
_COUNT = "num_batches_tracked"
_SIGNATURES = {each: inspect.signature(each) for each in (F.batch_norm, F.embedding)}


class ExtendedLayers:
    """The batch norms and embeddings of a model that are instances of an extension of torch's.

    Attributes:
        plain: torch's own module for each that was called, by its path.
    """

    def __init__(self) -> None:
        self.plain: dict[str, nn.Module] = {}
        self.counted: set[str] = set()

    def called(
        self, root: nn.Module, path: str, kind: str, target: Any, args: Any, kwargs: Any
    ) -> Node | None:
        """The input of such a layer, if an operation is what torch's own class does; else None.

        Args:
            root: the module that is traced.
            path: the path of the submodule at work.
            kind: the kind of the operation's node.
            target: the target of the operation's node.
            args: the positional arguments of the operation's node.
            kwargs: the keyword arguments of the operation's node.
        """
        if kind != "call_function" or target not in (F.batch_norm, F.embedding):
            return None
        module = root.get_submodule(path)
        given = _SIGNATURES[target].bind(*args, **kwargs)
        given.apply_defaults()
        is_own = _is_own_norm if target is F.batch_norm else _is_own_table
        if not is_own(module, path, given.arguments):
            return None
        self.plain[path] = plain(module)
        x = given.arguments["input"]
        return x if isinstance(x, Node) else None

    def counts(self, root: nn.Module, kind: str, target: Any, args: Any) -> bool:
        """Whether an operation adds one to the count of batches, as torch's own class does."""
        if kind != "call_method" or target != "add_" or len(args) != 2 or args[1] != 1:
            return False
        path, _, leaf = str(args[0].target).rpartition(".")
        counts = args[0].op == "get_attr" and leaf == _COUNT
        if not counts or not isinstance(root.get_submodule(path), _BatchNorm):
            return False
        self.counted.add(path)
        return True

    def put(self, *roots: nn.Module) -> None:
        """Puts torch's own modules in the place of those that extend them, once all is recorded.

        Raises:
            TraceError: a module counts batches, and is no batch norm otherwise.
        """
        for path in sorted(self.counted - {*self.plain}):
            raise TraceError(
                f"{path!r} counts its batches, and does not normalize as nn.BatchNorm does, by "
                "F.batch_norm on its own statistics, momentum and eps: extend nn.BatchNorm by what "
                "comes before or after it, or build it with track_running_stats=False"
            )
        for path in self.plain:
            for root in roots:
                root.set_submodule(path, plain(root.get_submodule(path)))
        self.plain.clear()


def plain(module: nn.Module) -> nn.Module:
    """The module of torch's own class that has the tensors, settings and parts of an extension."""
    cls = next(cls for cls in type(module).__mro__ if cls in _CLASSES)
    made: nn.Module = cls.__new__(cls)
    nn.Module.__init__(made)
    hooks = {name: table for name, table in vars(made).items() if "_hooks" in name}
    made.__dict__.update(vars(module) | hooks)  # hooks have been recorded by themselves
    return made


def _is_own_table(module: nn.Module, path: str, given: dict[str, Any]) -> bool:
    """Whether the arguments are those of torch's own embedding."""
    if type(module) is nn.Embedding or not isinstance(module, nn.Embedding):
        return False
    table, prefix = given["weight"], f"{path}." if path else ""
    if table.op != "get_attr" or table.target != f"{prefix}weight":
        return False
    options = ("padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse")
    return all(given[name] == getattr(module, name) for name in options)


def _is_own_norm(module: nn.Module, path: str, given: dict[str, Any]) -> bool:
    """Whether the arguments are those of torch's own batch norm."""
    if type(module) in _NORMS or not isinstance(module, _NORMS) or module.momentum is None:
        return False
    prefix = f"{path}." if path else ""
    tracked = not module.training or module.track_running_stats
    for name in _TENSORS:
        due = getattr(module, name) if tracked or "running" not in name else None
        node = given[name]
        if (node is None) != (due is None):
            return False
        if node is not None and (node.op != "get_attr" or node.target != prefix + name):
            return False
    of_batch = module.training or (module.running_mean is None and module.running_var is None)
    return bool(
        given["training"] == of_batch
        and given["momentum"] == module.momentum
        and given["eps"] == module.eps
    )
