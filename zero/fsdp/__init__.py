"""Stage 3: stage 2, and parameters that live only with their owner."""

from zero.fsdp.fsdp import FSDP
from zero.fsdp.precision import MixedPrecision
from zero.fsdp.strategy import ShardingStrategy

__all__ = ["FSDP", "MixedPrecision", "ShardingStrategy"]
