"""Stage 1, and the ground that all stages stand on."""

from zero.oss.comm import Traffic, traffic
from zero.oss.optimizer import OSS

__all__ = ["OSS", "Traffic", "traffic"]
