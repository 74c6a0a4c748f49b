"""Copies of what a rank is about to write, so that training can go on meanwhile.

They lie in the memory of the CPU, in one buffer a model, which is kept for the model's next save: memory that is new
to the process takes longer to be had than the copy to be made.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from zero.checkpoint.parts import Held

_ALIGNMENT = 64
"""Bytes that every copy starts at a multiple of, so that it can be seen as of any dtype."""

_buffers: WeakKeyDictionary[nn.Module, Tensor] = WeakKeyDictionary()


def staged(model: nn.Module, held: Sequence[Held]) -> list[Held]:
    """The same elements, held in copies. Those of an earlier call for this model are overwritten."""
    sizes = [-(-one.nbytes // _ALIGNMENT) * _ALIGNMENT for one in held]
    buffer, low, copies = _buffer(model, sum(sizes)), 0, []
    for one, size in zip(held, sizes, strict=True):
        copy = buffer[low : low + one.nbytes].view(one.whole.dtype)
        copies.append(replace(one, tensor=copy.copy_(one.flat()), offset=0))
        low += size
    return copies


def _buffer(model: nn.Module, nbytes: int) -> Tensor:
    kept = _buffers.get(model)
    if kept is not None and len(kept) >= nbytes:
        return kept
    del kept
    _buffers.pop(model, None)  # the old one goes before the new one comes
    _buffers[model] = torch.empty(nbytes, dtype=torch.uint8)
    return _buffers[model]
