"""ShardedDDP(overlap_param_gather=True); see gathers.py."""

from zero.features.gathers.gathers import PendingGathers
from zero.sdp.sharded_ddp import readings

readings["overlap_param_gather"] = PendingGathers
