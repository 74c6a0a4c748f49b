"""Transfers quantised to 8-bit integers, block by block: a wire; see codec.py."""

from zero.comm.wire import NAMES
from zero.features.int8.codec import Int8

NAMES.append("zero.Int8()")

__all__ = ["Int8"]
