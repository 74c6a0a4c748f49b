"""Copies of what a rank is about to write, so that training can go on meanwhile.

They are in the memory of the CPU, in one buffer a model, which the model's next save reuses: allocating memory that is
new to the process takes longer than the copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn

from zero.checkpoint.shards import Held

_ALIGNMENT = 64
"""Bytes. Every copy starts at a multiple of these, so that it can be viewed as any dtype."""

_buffers: WeakKeyDictionary[nn.Module, Tensor] = WeakKeyDictionary()
"""Buffers that no save is using."""


class Staging:
    """Copies of the held elements, until they are written.

    Another save of the model that begins before then makes copies of its own.
    """

    def __init__(self, model: nn.Module, held: Sequence[Held]) -> None:
        self.held: list[Held] = []
        self._model = ref(model)
        sizes = [-(-one.nbytes // _ALIGNMENT) * _ALIGNMENT for one in held]
        self._buffer, low = _buffer(model, sum(sizes)), 0
        for one, size in zip(held, sizes, strict=True):
            copy = self._buffer[low : low + one.nbytes].view(one.full.dtype)
            self.held.append(replace(one, tensor=copy.copy_(one.flat()), offset=0))
            low += size

    def release(self) -> None:
        """Leaves the memory to the model's next save."""
        model = self._model()
        if model is not None:
            _buffers[model] = self._buffer


def _buffer(model: nn.Module, nbytes: int) -> Tensor:
    reused = _buffers.pop(model, None)
    if reused is not None and len(reused) >= nbytes:
        return reused
    del reused  # freed before the larger one is allocated
    return torch.empty(nbytes, dtype=torch.uint8, device="cpu")
