"""ZeRO stage 3: parameters, gradients and optimizer state are sharded."""

from zero.fsdp.fsdp import FSDP
from zero.wrap.precision import MixedPrecision

__all__ = ["FSDP", "MixedPrecision"]
