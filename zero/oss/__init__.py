"""Stage 1: the optimizer state is sharded."""

from zero.oss.optimizer import OSS

__all__ = ["OSS"]
