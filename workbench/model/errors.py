"""Errors of models and of files of weights."""

from torch.fx import Node


class ModelError(ValueError):
    """A model that cannot be built: an unknown name, or arguments that its builder refuses."""


class TraceError(ValueError):
    """A model that cannot be traced: the text names the line and the remedy."""


class InsideError(TraceError):
    """What cannot be recorded operation by operation, and may be as one: the module around it."""


class OperationError(TraceError):
    """An operation of a model that cannot be traced.

    Attributes:
        node: the traced node, whose `meta` has the line and the module that it came from.
    """

    def __init__(self, node: Node, text: str) -> None:
        super().__init__(text)
        self.node = node


class CheckpointError(ValueError):
    """A file of weights that cannot be used: the text names the file and what is wrong."""
