"""Stage 1: the optimizer state is sharded."""

from zero.oss.optimizer import OSS
from zero.oss.scaler import GradScaler

__all__ = ["GradScaler", "OSS"]
