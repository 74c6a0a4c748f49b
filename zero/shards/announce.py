"""What each constructor logs, at INFO on the first rank of the group."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from zero.comm import Comm
from zero.shards.log import logger
from zero.shards.shard_group import ShardGroup


def announce(what: str, comm: Comm, groups: Sequence[ShardGroup], left_out: str = "", *, sharded: str) -> None:
    """Logs what was sharded. Constructors call it after their first collective operation.

    what: such as "OSS(Adam)". sharded: such as "optimizer state". left_out: parameters that are not sharded, and why.
    """
    if comm.rank or not logger.isEnabledFor(logging.INFO) or not groups:
        return  # the transport was chosen when ranks compared what they were given
    params = sum(len(group.params) for group in groups)
    full = sum(group.layout.numel * group.shard.element_size() for group in groups)
    mine = sum(group.shard.nbytes for group in groups)
    offloads = dict.fromkeys(group.offload.alike for group in groups if group.offload.active)
    logger.info(
        "%s: %s of %d parameters over %d ranks, %s of %s of their bytes on rank %d, sent by %s; left out: %s%s",
        *(what, sharded, params, comm.world, f"{mine:,}", f"{full:,}", comm.rank),
        *(comm.transport_name(groups[0].full.device), left_out or "nothing"),
        "".join(f"; {alike}, stepped by {torch.get_num_threads()} threads of the CPU" for alike in offloads),
    )
