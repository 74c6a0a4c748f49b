"""Gradients that overflowed.

Loss scaling skips a step whose gradients are not finite (P. Micikevicius et al., Mixed Precision Training, 2018,
section 3.2). With DistributedDataParallel all ranks see the same gradients and skip the same steps. With shards only
the owner of the overflowed elements would see them, and torch.amp.GradScaler checks each rank's gradients only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from zero.comm import Comm
from zero.shards.shard_group import ShardGroup


class Overflow:
    """Spreads overflows in shard groups that compute in float16; in all groups once autocast to float16 was seen.

    comms: the groups of ranks that have elements of the gradients. `groups`: those that compute in float16.
    """

    def __init__(self, groups: Sequence[ShardGroup], comms: Sequence[Comm]) -> None:
        self._all = groups
        self._comms = [(comm, comm.channel("the search for gradients that are not finite")) for comm in comms]
        self.groups: Sequence[ShardGroup] = [group for group in groups if group.full.dtype == torch.float16]

    def in_all_groups(self) -> None:
        """Notes that gradients of all groups may overflow, as under autocast: on every rank or none."""
        self.groups = self._all

    def spread(self) -> None:
        """Collective. If any rank has gradients that are not finite, writes an inf into a gradient of every rank."""
        if all(comm.world == 1 for comm, _ in self._comms):
            return
        params = [param for group in self.groups for param in group.params]
        gradients = [param.grad for param in params if param.grad is not None and param.grad.numel()]
        overflow = torch.zeros((), device=params[0].device)
        if gradients:
            sums = torch.stack([gradient.sum(dtype=torch.float32) for gradient in gradients])
            overflow = 1 - sums.isfinite().all().float()
        for comm, channel in self._comms:
            comm.all_reduce(overflow, maximum=True, channel=channel)
        if gradients:  # `overflow` is not read on the host, which would have to wait for a GPU
            # No view(-1): the elements of a convolution's gradient in channels_last do not lie in their order.
            first = gradients[0].as_strided((1,), (1,))
            first.copy_(torch.where(overflow > 0, math.inf, first))
