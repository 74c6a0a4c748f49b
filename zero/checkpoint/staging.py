"""Copies of what a rank is about to write, so that training can go on meanwhile.

They are in the memory of the CPU, in one buffer a model, which the model's next save reuses: allocating memory that is
new to the process takes longer than the copy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn

from zero.checkpoint.shards import Held

_ALIGNMENT = 64
"""Bytes. Every copy starts at a multiple of these, so that it can be viewed as any dtype."""

_buffers: WeakKeyDictionary[nn.Module, Tensor] = WeakKeyDictionary()
"""Buffers that no save is using."""


def staged(model: nn.Module, held: Sequence[Held]) -> tuple[list[Held], Callable[[], None]]:
    """Copies of the held elements, and the function that leaves their memory to the model's next save.

    Another save of the model that begins before then makes copies of its own.
    """
    sizes = [-(-one.nbytes // _ALIGNMENT) * _ALIGNMENT for one in held]
    buffer, low, weak = _buffer(model, sum(sizes)), 0, ref(model)
    copies = []
    for one, size in zip(held, sizes, strict=True):
        copy = buffer[low : low + one.nbytes].view(one.full.dtype)
        copies.append(replace(one, tensor=copy.copy_(one.flat()), offset=0))
        low += size

    def release() -> None:
        if (living := weak()) is not None:
            _buffers[living] = buffer

    return copies, release


def _buffer(model: nn.Module, nbytes: int) -> Tensor:
    reused = _buffers.pop(model, None)
    if reused is not None and len(reused) >= nbytes:
        return reused
    del reused  # freed before the larger one is allocated
    return torch.empty(nbytes, dtype=torch.uint8, device="cpu")
