"""An experiment as it travels to engines."""

import struct
import zlib
from dataclasses import replace

from workbench.plan.experiment import Experiment
from workbench.plan.plan import Plan

_HEAD = struct.Struct("=I")


def pack(experiment: Experiment) -> bytes:
    """The experiment's TOML, compressed, then its module's skeleton where it has one."""
    text = zlib.compress(experiment.to_toml().encode(), 9)
    return _HEAD.pack(len(text)) + text + (experiment.plan.graph.source.skeleton or b"")


def unpack(message: bytes) -> Experiment:
    """The inverse of `pack`."""
    (length,) = _HEAD.unpack_from(message)
    text, skeleton = message[_HEAD.size :][:length], message[_HEAD.size + length :]
    experiment = Experiment.from_toml(zlib.decompress(text).decode())
    if not skeleton:
        return experiment
    plan: Plan = experiment.plan
    source = replace(plan.graph.source, skeleton=skeleton)
    return experiment.replace(plan=replace(plan, graph=replace(plan.graph, source=source)))
