"""Stage 2: optimizer state and gradients are sharded; and stage 1 of zero.setup, where gradients stay full."""

from zero.sdp.sharded_ddp import AveragingDDP, ShardedDDP

__all__ = ["AveragingDDP", "ShardedDDP"]
