"""What goes wrong between ranks."""


class CommError(RuntimeError):
    """A collective did not complete; the world it ran in has to be closed."""


class CommTimeout(CommError):
    """Some rank did not come in time.

    Args:
        message: what was waited for, by whom and for how long.
        missing: the global ranks that are not known to have arrived.
    """

    def __init__(self, message: str, missing: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.missing = missing


class PeerLost(CommError):
    """Another rank does not come any more: its process ended, or it gave up after an error."""


class CodecError(CommError):
    """A codec cannot hold a value: it is too large, infinite, or NaN.

    Args:
        message: the codec, the collective and the rank, and what was given.
        layer: the layer to which the value probably belongs; "": it is not known.
    """

    def __init__(self, message: str, layer: str = "") -> None:
        super().__init__(message)
        self.layer = layer
