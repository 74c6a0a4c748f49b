"""Buffers, such as BatchNorm's statistics: those of the first rank count, as with DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from zero.oss.comm import Comm


class BufferSync:
    """Broadcasts a module's buffers from rank 0 of the group (of each in turn) before a forward.

    Like DistributedDataParallel, before each forward that follows one which will be reduced, and before the first:
    forwards under `no_sync` and `no_grad` leave the buffers of the next forward alone.
    """

    def __init__(self, module: nn.Module, comms: Sequence[Comm]) -> None:
        self._module, self._comms = module, comms
        self._due = True

    def before_forward(self) -> None:
        """Collective."""
        if self._due:
            for comm in self._comms:
                comm.broadcast([*self._module.buffers()])

    def after_forward(self, *, reduced: bool) -> None:
        self._due = reduced and torch.is_grad_enabled()
