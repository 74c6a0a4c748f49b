"""Penalties that the training loop computes from shards; see at_rest.py."""

from zero.features.penalties.at_rest import ReadsAtRest
from zero.fsdp.events import makers

makers.append(ReadsAtRest)
