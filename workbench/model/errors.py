"""Errors of models and of files of weights."""


class ModelError(ValueError):
    """A model that cannot be built: an unknown name, or arguments that its builder refuses."""


class TraceError(ValueError):
    """A model that cannot be traced: the text names the line and the remedy."""


class CheckpointError(ValueError):
    """A file of weights that cannot be used: the text names the file and what is wrong."""
