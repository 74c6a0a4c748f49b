"""Stage 2: stage 1, and gradients that live only with their owner."""

from zero.sdp.sharded_ddp import ShardedDDP

__all__ = ["ShardedDDP"]
