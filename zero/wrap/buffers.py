"""Broadcasts buffers, such as BatchNorm's statistics, from the first rank, as DistributedDataParallel does."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from zero._torch.autograd import keeping_versions
from zero._torch.modules import buffers_of
from zero.comm import Comm


class BufferSync:
    """Broadcasts a module's buffers from rank 0 of each group, one group after another, before a forward.

    Like DistributedDataParallel, it broadcasts before the first forward, and before each forward that follows one whose
    gradients are reduced: after forwards under `no_sync` or `no_grad` it does not.

    Raises, on every rank, if names, shapes or dtypes of buffers have come to differ between ranks, such as those of a
    cache that grows with a rank's own batch.
    """

    def __init__(self, module: nn.Module, comms: Sequence[Comm]) -> None:
        self._comms, self._due = comms, True
        # By name where each lies. Modules that take the place of others, and buffers that are registered later, are not
        # seen, as with DistributedDataParallel.
        self._held = [
            (f"{path}.{name}".strip("."), table, name)
            for path, holder in module.named_modules()
            # The buffers of TorchScript lie in no dictionary, and stay the same.
            for of_script in [isinstance(holder, torch.jit.ScriptModule)]
            for table in [dict(holder.named_buffers(recurse=False)) if of_script else buffers_of(holder)]
            for name in table
        ]
        self._known = [(buffer.shape, buffer.dtype) for buffer in self._buffers()]

    def _buffers(self) -> list[Tensor]:
        """Each once."""
        found = (table.get(name) for _, table, name in self._held)
        return [*dict.fromkeys(buffer for buffer in found if buffer is not None)]

    def before_forward(self) -> None:
        """Collective. Broadcasts the buffers if that is due."""
        if not self._due:
            return
        buffers = self._buffers()
        shapes = [(buffer.shape, buffer.dtype) for buffer in buffers]
        if shapes != self._known:
            self._compare()
            self._known = shapes
        if not buffers:
            return
        # As with DistributedDataParallel, a graph that has saved buffers may still be gone through: batch normalisation
        # saves its statistics in training, too, where backward does not compute with them.
        with keeping_versions(tuple(buffer for buffer in buffers if not buffer.is_inference())):
            for comm in self._comms:
                comm.broadcast(buffers)

    def _compare(self) -> None:
        """Collective over the ranks on which shapes have changed. Ranks that broadcast meanwhile raise."""
        held = ((title, table.get(name)) for title, table, name in self._held)
        shapes = [f"{name}: {list(buffer.shape)}, {buffer.dtype}" for name, buffer in held if buffer is not None]
        try:
            for comm in self._comms:
                comm.compare("the buffers of the model, which have changed since it was wrapped,", shapes)
        except RuntimeError as error:
            raise RuntimeError(
                f"buffers have changed on this rank, but not on all; they are now {', '.join(shapes)}. The first rank "
                "broadcasts them before a forward: give them one shape on all ranks, or pass broadcast_buffers=False."
            ) from error

    def after_forward(self, *, reduced: bool) -> None:
        """Notes whether the next broadcast is due. reduced: whether this forward's gradients will be reduced."""
        self._due = reduced and torch.is_grad_enabled()
