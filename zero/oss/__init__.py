"""Stage 1, and what all stages lay parameters out by."""

from zero.oss.optimizer import OSS
from zero.oss.scaler import GradScaler

__all__ = ["GradScaler", "OSS"]
