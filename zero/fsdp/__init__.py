"""Stage 3: stage 2, and parameters that live only with their owner."""

from zero.fsdp.fsdp import FSDP
from zero.fsdp.precision import MixedPrecision
from zero.fsdp.prefetch import MEMORY_FIRST, SPEED_FIRST, BackwardPrefetch, Prefetch
from zero.fsdp.strategy import ShardingStrategy
from zero.oss.offload import CPUOffload, DiskOffload

__all__ = [
    "FSDP",
    "MEMORY_FIRST",
    "SPEED_FIRST",
    "BackwardPrefetch",
    "CPUOffload",
    "DiskOffload",
    "MixedPrecision",
    "Prefetch",
    "ShardingStrategy",
]
