"""From torch models to graphs, and their weights as slices."""

from workbench.model.build import build, build_fake
from workbench.model.errors import CheckpointError, ModelError, TraceError
from workbench.model.pieces import Piece, index_pieces
from workbench.model.slices import PieceSet, Reader, WeightsFile, expect
from workbench.model.snapshot import Snapshot
from workbench.model.trace import skeleton, trace
from workbench.model.weights import initialize

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
