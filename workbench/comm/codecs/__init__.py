"""Codecs on tensors: what travels is a flat tensor of bytes, of a length that is known before."""

from workbench.comm.codecs.coder import Coder as Coder
from workbench.comm.codecs.coding import Coding as Coding
from workbench.comm.codecs.coding import coder_of as coder_of
