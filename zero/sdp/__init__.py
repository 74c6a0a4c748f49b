"""Stage 2: optimizer state and gradients are sharded."""

from zero.sdp.sharded_ddp import ShardedDDP

__all__ = ["ShardedDDP"]
