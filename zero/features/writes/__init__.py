"""Writes of a forward into its parameters; see writes.py."""

from zero.features.writes.writes import Writes
from zero.fsdp.events import makers

makers.append(Writes)
