"""Tracing of torch models into graphs, and reading and writing of their weights in slices."""

from workbench.model.build import build, build_fake
from workbench.model.errors import CheckpointError, ModelError, TraceError
from workbench.model.tracing.trace import skeleton, trace
from workbench.model.weights.initial import initialize
from workbench.model.weights.pieces import Piece, Snapshot, index_pieces
from workbench.model.weights.slices import PieceSet, Reader, WeightsFile, expect

__all__ = [
    "CheckpointError",
    "ModelError",
    "Piece",
    "PieceSet",
    "Reader",
    "Snapshot",
    "TraceError",
    "WeightsFile",
    "build",
    "build_fake",
    "expect",
    "index_pieces",
    "initialize",
    "skeleton",
    "trace",
]
