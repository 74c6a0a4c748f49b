"""Modules that read parameters of other units; see reads.py."""

from zero.features.reads.reads import Reads
from zero.fsdp.events import makers

makers.append(Reads)
