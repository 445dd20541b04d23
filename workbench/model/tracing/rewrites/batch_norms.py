"""Batch norms in modules that extend torch's, as those with an activation inside.

Such a module calls `torch.nn.functional.batch_norm` with its own parameters and statistics. That
call is what the `forward` of torch's own class does, and is recorded as a call of that class: a
batch norm, whose statistics a plan can average, synchronize and save.
"""

import inspect
from typing import Any

import torch.nn.functional as F
from torch import nn
from torch.fx import Node
from torch.nn.modules.batchnorm import _BatchNorm

from workbench.model.errors import TraceError

_CLASSES = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_TENSORS = ("running_mean", "running_var", "weight", "bias")
_COUNT = "num_batches_tracked"
_SIGNATURE = inspect.signature(F.batch_norm)


class ExtendedBatchNorms:
    """The batch norms of a model that are instances of an extension of torch's classes.

    Attributes:
        plain: torch's own module for each that was called, by its path.
    """

    def __init__(self) -> None:
        self.plain: dict[str, nn.Module] = {}
        self.counted: set[str] = set()

    def called(
        self, root: nn.Module, path: str, kind: str, target: Any, args: Any, kwargs: Any
    ) -> Node | None:
        """The input of a batch norm, if an operation is what torch's own class does; else None.

        Args:
            root: the module that is traced.
            path: the path of the submodule at work.
            kind: the kind of the operation's node.
            target: the target of the operation's node.
            args: the positional arguments of the operation's node.
            kwargs: the keyword arguments of the operation's node.
        """
        if kind != "call_function" or target is not F.batch_norm:
            return None
        module = root.get_submodule(path)
        given = _SIGNATURE.bind(*args, **kwargs)
        given.apply_defaults()
        if not isinstance(module, _BatchNorm) or not _is_own(module, path, given.arguments):
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
        """Puts torch's own modules in the place of those that extend them.

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


def plain(module: nn.Module) -> nn.Module:
    """The module of torch's own class that has the tensors, settings and parts of an extension."""
    cls = next(cls for cls in type(module).__mro__ if cls in _CLASSES)
    made: nn.Module = cls.__new__(cls)
    nn.Module.__init__(made)
    hooks = {name: table for name, table in vars(made).items() if "_hooks" in name}
    made.__dict__.update(vars(module) | hooks)  # hooks have been recorded by themselves
    return made


def _is_own(module: _BatchNorm, path: str, given: dict[str, Any]) -> bool:
    """Whether the arguments are those of torch's own class."""
    if type(module) in _CLASSES or not isinstance(module, _CLASSES) or module.momentum is None:
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
