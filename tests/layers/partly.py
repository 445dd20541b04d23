"""The nets of `nets.py`, trained in part: some parameters frozen, some parts kept in eval mode."""

import zlib

from torch import nn

from tests.layers import nets
from workbench.model.trace import trace


def _partly(net: type[nn.Module], kind: int) -> type[nn.Module]:
    """A net of which chance, the same every time, freezes parameters and parts."""

    def chance(name: str, of: int) -> bool:
        return zlib.crc32(f"{net.__name__}/{kind}/{name}".encode()) % of == 0

    def __init__(self: nn.Module) -> None:
        net.__init__(self)
        last = [name for name, _ in self.named_parameters()][-1]
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(name == last if kind == 0 else not chance(name, 2))
        for path, part in self.named_modules():
            if path and kind != 1:
                part.training = not chance(path, 2)

    # Found again by this name where it is unpickled.
    fields = {"__init__": __init__, "__module__": __name__}
    return type(f"Partly{net.__name__}{kind}", (net,), fields)


NETS = tuple(_partly(net, kind) for net in nets.NETS for kind in range(3))
globals().update({net.__name__: net for net in NETS})
GRAPHS = {net: trace(net(), input_shape=net.shape) for net in NETS}
