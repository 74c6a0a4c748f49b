"""Stage 1, and the ground that all stages stand on."""

from zero.comm import Traffic, traffic
from zero.oss.optimizer import OSS
from zero.oss.scaler import GradScaler

__all__ = ["GradScaler", "OSS", "Traffic", "traffic"]
