"""Checkpoints: saved at any stage on any number of ranks, loaded at any other.

What is stored is whole tensors by name, in pieces; who wrote which piece does not matter to who reads it. So there is
nothing to convert between stages, numbers of ranks or cuts: a reader asks for the ranges that it needs.
"""

from zero.checkpoint.format import CheckpointError
from zero.checkpoint.read import load
from zero.checkpoint.write import Saving, save

__all__ = ["CheckpointError", "Saving", "load", "save"]
