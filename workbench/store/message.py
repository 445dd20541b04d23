"""An experiment, and what goes with it, as they travel to engines."""

import pickle
import struct
import zlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from workbench.plan.experiment import Experiment
from workbench.plan.graph import Graph
from workbench.plan.plan import Plan

_HEAD = struct.Struct("=II")


def pack(experiment: Experiment) -> bytes:
    """The experiment's TOML, compressed, then its module's skeletons where it has some.

    One is of the module in training, the other in evaluation, if it takes another way then.
    """
    text = zlib.compress(experiment.to_toml().encode(), 9)
    graph: Graph = experiment.plan.graph
    training = graph.source.skeleton or b""
    evaluating = graph.evaluation.source.skeleton or b"" if graph.evaluation else b""
    return _HEAD.pack(len(text), len(training)) + text + training + evaluating


def unpack(message: bytes) -> Experiment:
    """The inverse of `pack`."""
    length, of_training = _HEAD.unpack_from(message)
    text, skeletons = message[_HEAD.size :][:length], message[_HEAD.size + length :]
    experiment = Experiment.from_toml(zlib.decompress(text).decode())
    if not skeletons:
        return experiment
    plan: Plan = experiment.plan
    graph = _with_skeleton(plan.graph, skeletons[:of_training])
    if graph.evaluation is not None:
        there = _with_skeleton(graph.evaluation, skeletons[of_training:])
        graph = replace(graph, evaluation=there)
    return experiment.replace(plan=replace(plan, graph=graph))


def _with_skeleton(graph: Graph, skeleton: bytes) -> Graph:
    return replace(graph, source=replace(graph.source, skeleton=skeleton))


def pack_keywords(keywords: Mapping[str, Any]) -> bytes:
    """Further arguments of a call; they are small, and of classes that engines can import."""
    return zlib.compress(pickle.dumps(dict(keywords)))


def unpack_keywords(packed: bytes) -> dict[str, Any]:
    """The inverse of `pack_keywords`; no bytes: no arguments."""
    keywords: dict[str, Any] = pickle.loads(zlib.decompress(packed)) if packed else {}
    return keywords
