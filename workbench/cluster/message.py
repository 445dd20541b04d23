"""An experiment, and what goes with it, as they travel to engines."""

import pickle
import struct
import zlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

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


def pack_keywords(keywords: Mapping[str, Any]) -> bytes:
    """Further arguments of a call; they are small, and of classes that engines can import."""
    return zlib.compress(pickle.dumps(dict(keywords)))


def unpack_keywords(packed: bytes) -> dict[str, Any]:
    """The inverse of `pack_keywords`; no bytes: no arguments."""
    keywords: dict[str, Any] = pickle.loads(zlib.decompress(packed)) if packed else {}
    return keywords
