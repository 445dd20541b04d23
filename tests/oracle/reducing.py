"""Makes a case that fails small: what can be left out while it still fails, is."""

from collections.abc import Callable, Iterator
from dataclasses import replace

from tests.oracle.cases import CLASSES, Case, Cut, Run
from tests.oracle.models import Net

Fails = Callable[[Case], bool]


def reduced(case: Case, fails: Fails, most: int = 100) -> Case:
    """The smallest case on the way down that still fails.

    Args:
        case: fails.
        fails: whether a case does, in the same way.
        most: cases to try.
    """
    tried = 0
    going = True
    while going:
        going = False
        for other in _simpler(case):
            if tried == most:
                return case
            if other == case or not runs(other.net):
                continue
            tried += 1
            if fails(other):
                case, going = other, True
                break
    return case


def runs(net: Net) -> bool:
    """Whether torch itself runs the module, and it gives scores."""
    found = net.runs()
    return found is not None and found[0].shape[1:] == (CLASSES,)


def _simpler(case: Case) -> Iterator[Case]:
    """Cases with less in them, those that leave most out first."""
    if case.way != "straight":
        yield replace(case, way="straight", then=None)
    if case.then is not None:
        yield replace(case, then=None)
        yield from (replace(case, then=cut) for cut in _simpler_cuts(case.then))
    yield from (replace(case, run=run) for run in _simpler_runs(case.run))
    yield from (replace(case, cut=cut) for cut in _simpler_cuts(case.cut))
    yield from (replace(case, net=net) for net in _simpler_nets(case.net))
    for world in range(1, case.cut.world):
        cut = Cut(world, rows=case.cut.rows and (1.0,) * world, local=case.cut.local)
        if case.then is None and not isinstance(case.run.shard, tuple):
            yield replace(case, cut=cut)


def _simpler_runs(run: Run) -> Iterator[Run]:
    plain = Run(batch_size=run.batch_size, samples=run.samples, seed=run.seed)
    yield plain
    for name in vars(plain):
        if getattr(run, name) != getattr(Run(), name):
            yield replace(run, **{name: getattr(Run(), name)})


def _simpler_cuts(cut: Cut) -> Iterator[Cut]:
    yield Cut(cut.world)
    for name in ("layers", "recompute", "rows", "rounds", "local", "tokens"):
        if getattr(cut, name) != getattr(Cut(), name):
            yield replace(cut, **{name: getattr(Cut(), name)})
    for index, (name, scheme, k, shares) in enumerate(cut.layers):
        rest = cut.layers[:index] + cut.layers[index + 1 :]
        yield replace(cut, layers=rest)
        if shares is not None:
            yield replace(cut, layers=(*rest, (name, scheme, k, None)))
    for index in range(len(cut.recompute)):
        yield replace(cut, recompute=cut.recompute[:index] + cut.recompute[index + 1 :])


def _simpler_nets(net: Net) -> Iterator[Net]:
    lines = net.forward
    for size in (4, 3, 2, 1):
        for first in range(len(lines) - size + 1):
            left = lines[:first] + lines[first + size :]
            yield _refitted(replace(net, forward=left))
    for index in range(len(net.init)):
        yield replace(net, init=net.init[:index] + net.init[index + 1 :])


def _refitted(net: Net) -> Net:
    """With a head for what comes now, and without what nothing names any more."""
    if not net.forward or not net.forward[-1].startswith("x = self.head"):
        return net
    before = replace(net, init=tuple(_named(net)), forward=net.forward[:-1])
    found = before.runs()
    if found is None:
        return net
    head = f"self.head = nn.Linear({found[0].shape[-1]}, {CLASSES})"
    return replace(before, init=(*before.init, head), forward=net.forward)


def _named(net: Net) -> Iterator[str]:
    """Lines of `__init__` that make something that `forward` names."""
    said = "\n".join(net.forward)
    for line in net.init:
        name = line.replace("self.register_buffer('", "self.").split("=")[0].split("'")[0].strip()
        if name != "self.head" and (name.split(".")[1] in said):
            yield line
