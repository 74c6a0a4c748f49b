"""Gradients that overflowed in float16, made visible on every rank.

Loss scaling skips a step whose gradients are not finite (P. Micikevicius et al., Mixed Precision Training, 2018,
section 3.2). With DistributedDataParallel all ranks see the same gradients and skip the same steps. Of shards only the
owner of what overflowed would see it, and torch.amp.GradScaler looks at one rank only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from zero.comm import Comm
from zero.oss.shard_group import ShardGroup


class Overflow:
    """Of the gradients of units that compute in float16, or of all units once a forward ran under autocast to it."""

    def __init__(self, groups: Sequence[ShardGroup], comm: Comm) -> None:
        self._comm, self._groups = comm, groups
        self._in_float16: Sequence[ShardGroup] = [group for group in groups if group.full.dtype == torch.float16]

    def before_forward(self) -> None:
        """Notices autocast, which must be the same on every rank."""
        device = self._groups[0].full.device.type
        if torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) == torch.float16:
            self._in_float16 = self._groups

    def spread(self) -> None:
        """Collective. Where a rank has gradients that are not finite, the others get an inf into theirs."""
        if not self._in_float16 or self._comm.world == 1:
            return
        params = [param for group in self._in_float16 for param in group.params]
        gradients = [param.grad for param in params if param.grad is not None and param.grad.numel()]
        found = torch.zeros((), device=params[0].device)
        if gradients:
            sums = torch.stack([gradient.sum(dtype=torch.float32) for gradient in gradients])
            found = 1 - sums.isfinite().all().float()
        self._comm.all_reduce(found, maximum=True)
        if gradients:  # nothing is asked of `found` here, which on a GPU would have to be waited for
            first = gradients[0].view(-1)[:1]
            first.copy_(torch.where(found > 0, math.inf, first))
