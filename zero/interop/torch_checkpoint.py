"""Detects calls of torch.distributed.checkpoint, which treats tensors of one name as copies.

torch.distributed.checkpoint.state_dict calls an optimizer's state_dict() on every rank and saves the result of one
rank, so it must get the full state. torch has no public sign of such a call; its calls are collective, so the answer
may be.
"""

from __future__ import annotations

import sys

_FRAMES = 10
"""Frames that are searched: between torch's and ours are hooks and decorators of torch.optim.Optimizer."""


def asked_by_torch_checkpoint() -> bool:
    """Whether torch.distributed.checkpoint is among the callers."""
    frame = sys._getframe(1)
    for _ in range(_FRAMES):
        if frame.f_globals.get("__name__", "").startswith("torch.distributed.checkpoint"):
            return True
        if frame.f_back is None:
            return False
        frame = frame.f_back
    return False
