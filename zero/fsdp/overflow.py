"""Gradients that overflowed in float16, made visible on every rank.

Loss scaling skips a step whose gradients are not finite (P. Micikevicius et al., Mixed Precision Training, 2018,
section 3.2). With DistributedDataParallel all ranks see the same gradients and skip the same steps. Of parts only the
owner of what overflowed would see it, and torch.amp.GradScaler looks at one rank only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from zero.fsdp.unit import Unit
from zero.oss.comm import Comm


class Overflow:
    """Of the gradients of units that compute in float16; nothing is done where none does."""

    def __init__(self, units: Sequence[Unit], comm: Comm) -> None:
        self._comm = comm
        self._params = [
            param
            for unit in units
            for group in unit.groups
            if group.full.dtype == torch.float16
            for param in group.params
        ]

    def spread(self) -> None:
        """Collective. Where a rank has gradients that are not finite, the others get an inf into theirs."""
        if not self._params or self._comm.world == 1:
            return
        gradients = [param.grad for param in self._params if param.grad is not None and param.grad.numel()]
        found = torch.zeros((), device=self._params[0].device)
        if gradients:
            sums = torch.stack([gradient.sum(dtype=torch.float32) for gradient in gradients])
            found = 1 - sums.isfinite().all().float()
        self._comm.all_reduce(found, maximum=True)
        if gradients:  # nothing is asked of `found` here, which on a GPU would have to be waited for
            first = gradients[0].view(-1)[:1]
            first.copy_(torch.where(found > 0, math.inf, first))
