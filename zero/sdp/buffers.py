"""Buffers, such as BatchNorm's statistics: those of the first rank count, as with DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.autograd.graph import increment_version

from zero.comm import Comm


class BufferSync:
    """Broadcasts a module's buffers from rank 0 of the group (of each in turn) before a forward.

    Like DistributedDataParallel, before each forward that follows one which will be reduced, and before the first:
    forwards under `no_sync` and `no_grad` leave the buffers of the next forward alone.

    Raises, on every rank, where buffers have become other ones than on other ranks: a cache that grew with a rank's own
    batch, say.
    """

    def __init__(self, module: nn.Module, comms: Sequence[Comm]) -> None:
        self._module, self._comms = module, comms
        self._due = True
        self._known = self._shapes()

    def _shapes(self) -> list[tuple[torch.Size, torch.dtype]]:
        return [(buffer.shape, buffer.dtype) for buffer in self._module.buffers()]

    def before_forward(self) -> None:
        """Collective."""
        if not self._due:
            return
        shapes = self._shapes()
        if shapes != self._known:
            self._compare()
            self._known = shapes
        buffers = [*self._module.buffers()]
        for comm in self._comms:
            comm.broadcast(buffers)
        if any(comm.world > 1 for comm in self._comms):
            # Backward refuses a graph that read a buffer before it was overwritten; on rank 0, where nothing was
            # written, it would go on, and wait for ranks that have raised.
            increment_version([buffer for buffer in buffers if not buffer.is_inference()])

    def _compare(self) -> None:
        """Collective, for ranks where shapes have changed. Others, in a broadcast, then raise."""
        shapes = [f"{name}: {list(buffer.shape)}, {buffer.dtype}" for name, buffer in self._module.named_buffers()]
        try:
            for comm in self._comms:
                comm.compare("the buffers of the model, which have changed since it was wrapped,", shapes)
        except RuntimeError as error:
            raise RuntimeError(
                f"buffers have changed on this rank, but not on all; they are now {', '.join(shapes)}. Before a "
                "forward all become those of the first rank: give them one shape, or pass broadcast_buffers=False."
            ) from error

    def after_forward(self, *, reduced: bool) -> None:
        self._due = reduced and torch.is_grad_enabled()
