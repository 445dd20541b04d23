"""The nets of `nets.py`, trained in part: some parameters frozen, some parts kept in eval mode."""

import zlib

import torch
from torch import Tensor, nn

from tests.layers import nets


class Aside(nn.Module):
    """Branches that are detached or compared, among layers that are cut."""

    shape = (3, 3, 2)

    def __init__(self) -> None:
        super().__init__()
        self.first, self.side = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 1)
        self.middle, self.gate = nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 1)
        self.norm = nn.BatchNorm2d(8)
        self.last = nn.Linear(48, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.first(x))
        fixed = torch.tanh(self.side(x)).detach()
        y = self.middle(x) + fixed
        y = self.norm(y) * (y > 0).to(y.dtype)
        return self.last((y + torch.relu(self.gate(y.detach()))).flatten(1))


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


NETS = (Aside, *(_partly(net, kind) for net in (*nets.NETS, Aside) for kind in range(3)))
globals().update({net.__name__: net for net in NETS})
GRAPHS = nets.Graphs()
