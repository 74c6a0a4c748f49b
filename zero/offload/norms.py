"""Norms of gradients, computed on the device before the gradients leave it.

To read them in the memory of the CPU would take about a tenth of the time of a step, between backward and step, where
nothing else runs. torch counts writes into a gradient, except through `.data`: for these a sample is compared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from zero._torch.autograd import base_of, writes_so_far
from zero._torch.tensors import norms_of
from zero.comm.streams import on_other_device

# Elements of a flat tensor of gradients that are compared.
_SAMPLE = 256


@dataclass(eq=False)
class Left:
    """What is known of a flat tensor of gradients since it has left the device. norms: by offset, 0-dim, on the device.
    sample: every `stride`-th element, on the device."""

    norms: Mapping[int, Tensor]
    sample: Tensor
    stride: int
    version: int

    def holds(self, copied: Tensor) -> bool:
        """Whether nobody has written into the tensor. Waits for the sample."""
        return writes_so_far([copied]) == self.version and torch.equal(
            copied[:: self.stride], self.sample.to(copied.device)
        )


# By flat tensor in the memory of the CPU.
_left = WeakIdKeyDictionary()


def note(copied: Tensor, sums: Tensor, own: Sequence[Tensor]) -> None:
    """Computes the norms of gradients `own`, views of the flat `sums`, that were copied to `copied`."""
    if not own or not on_other_device(sums, copied):
        return
    norms = norms_of([*own], 2.0, torch.promote_types(sums.dtype, torch.float32))
    offsets = [int(flat.storage_offset() - sums.storage_offset()) for flat in own]
    stride = max(len(sums) // _SAMPLE, 1)
    sample = sums[::stride].to(copied.dtype, copy=True)
    _left[copied] = Left(dict(zip(offsets, norms, strict=True)), sample, stride, writes_so_far([copied]))


def known(gradients: Sequence[Tensor], norm_type: float) -> dict[int, Tensor]:
    """Returns the norms that are known and still hold, by position."""
    found: dict[int, Tensor] = {}
    holds = cache(Left.holds)
    for position, gradient in enumerate(gradients if norm_type == 2 else ()):
        copied = base_of(gradient)
        if copied is not None and (left := _left.get(copied)) is not None and holds(left, copied):
            found[position] = left.norms[int(gradient.storage_offset())]
    return found
