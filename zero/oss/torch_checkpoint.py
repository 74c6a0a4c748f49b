"""Calls from torch's distributed checkpoint, which takes tensors of one name for copies of one another.

torch.distributed.checkpoint.state_dict asks an optimizer for its state_dict() on every rank and saves what it gets from
one of them, so it must be given the full state. It says nowhere that it is the one who asks, but its calls are
collective, so the answer may be, too.
"""

from __future__ import annotations

import sys

_FRAMES = 10
"""How far up its own frame is looked for: between lie the hooks and decorators of torch.optim.Optimizer."""


def asked_by_torch_checkpoint() -> bool:
    """Whether the caller was called from torch.distributed.checkpoint."""
    frame = sys._getframe(1)
    for _ in range(_FRAMES):
        if frame.f_globals.get("__name__", "").startswith("torch.distributed.checkpoint"):
            return True
        if frame.f_back is None:
            return False
        frame = frame.f_back
    return False
