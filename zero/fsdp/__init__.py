"""Stage 3: stage 2, and parameters that live only with their owner."""

from zero.fsdp.fsdp import FSDP

__all__ = ["FSDP"]
