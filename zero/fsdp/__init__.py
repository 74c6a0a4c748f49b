"""ZeRO stage 3: parameters, gradients and optimizer state are sharded."""

from zero.fsdp.fsdp import FSDP
from zero.fsdp.options import ShardingStrategy
from zero.fsdp.precision import MixedPrecision
from zero.fsdp.prefetch import MEMORY_FIRST, SPEED_FIRST, BackwardPrefetch, Prefetch

__all__ = [
    "FSDP",
    "MEMORY_FIRST",
    "SPEED_FIRST",
    "BackwardPrefetch",
    "MixedPrecision",
    "Prefetch",
    "ShardingStrategy",
]
