"""Codecs on tensors: what travels is a flat tensor of bytes, of a length that is known before."""

from workbench.comm.codecs.coders import Coder as Coder
from workbench.comm.codecs.coders import coder_of as coder_of
from workbench.comm.codecs.coding import PieceCoding as PieceCoding
