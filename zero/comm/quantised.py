"""Tensors that travel as 8-bit integers, block by block (ZeRO++: qwZ, qgZ; Wang et al., arXiv 2306.10209, section 3).

    share    flat: a shard of parameters, or what one rank gives another of a gradient
    wire     a share as bytes: one record after another, each of `block` codes (int8) and their scale (float32). The
             last block of a share is filled up with zeros, so every share begins with a record

A code is the multiple of the scale that is nearest to an element; the scale is 1/127 of the largest element of the
block. So each element is off by at most 1/254 of the largest one, and by the rounding of the dtype that it arrives in.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zero.comm.sums import add_in_order

QUANTISED = (torch.float32, torch.bfloat16, torch.float16)
"""Of other dtypes 8 bits would be too few, or the range of a scale too small."""

_SCALE = 4
"""Bytes of a scale."""

_STEP = (1 - 2**-22) / 127
"""Rounded down, so that nothing arrives larger than the largest element of its block, and overflows."""

_SMALLEST = 2.0**-118
"""Blocks below it have the scale of this, which is a normal number."""

_IN_CACHE, _ON_GPU = 1 << 18, 1 << 24
"""Elements that are computed with at a time, so that what lies in between is small; on GPUs few kernels do it."""


@dataclass(frozen=True)
class Int8:
    """Stands where a dtype of what travels is asked for: 8-bit integers with a float32 scale a block of `block`
    elements, which is (1 + 4 / block) bytes an element.

    A block that holds NaN arrives as NaN. One that holds infinities arrives with these in their places and NaN in all
    others. Raises ValueError for a block that is no positive multiple of 8.
    """

    block: int = 256

    def __post_init__(self) -> None:
        if isinstance(self.block, bool) or not isinstance(self.block, int) or self.block < 1 or self.block % 8:
            raise ValueError(f"Int8(block={self.block!r}): a block is a positive multiple of 8 elements, such as 256.")

    @property
    def itemsize(self) -> int:
        """Bytes of an element, but for its part of a scale; as of a dtype."""
        return 1

    def lengths(self, counts: Iterable[int]) -> list[int]:
        """Bytes of shares of so many elements."""
        return [-(-count // self.block) * (self.block + _SCALE) for count in counts]

    def encode(self, flat: Tensor, counts: Sequence[int]) -> Tensor:
        """Shares of so many elements, one after another, as bytes."""
        wire = flat.new_zeros(sum(self.lengths(counts)), dtype=torch.uint8)
        for shares, sent in self._rows(flat, wire, counts):
            for place, codes, scales in self._pieces(shares.shape[-1], sent):
                values = shares[..., place].view(codes.shape)
                largest = values.abs().amax(-1, keepdim=True).float()  # torch.aminmax takes ten times as long
                scales.copy_(largest.clamp_(min=_SMALLEST).mul_(_STEP))
                finite = scales.clamp(max=torch.finfo(scales.dtype).max)  # by which infinities stay what they are
                codes.copy_(values.div(finite).round_().clamp_(-127, 127))
        return wire

    def decode(self, wire: Tensor, into: Tensor, counts: Sequence[int]) -> None:
        """Overwrites `into` by what was encoded."""
        for shares, sent in self._rows(into, wire, counts):
            for place, codes, scales in self._pieces(shares.shape[-1], sent):
                shares[..., place].view(codes.shape).copy_(codes).mul_(scales)

    def rounded(self, flat: Tensor) -> Tensor:
        """What arrives of a share, as a new tensor."""
        arrived = torch.empty_like(flat)
        self.decode(self.encode(flat, [len(flat)]), arrived, [len(flat)])
        return arrived

    def add(self, rows: Tensor, into: Tensor, times: float) -> None:
        """Overwrites `into`, float32, by the sum of the ranks' shares times a number; on the CPU added in rank order.

        rows: of each rank its share as bytes.
        """
        for place, codes, scales in self._pieces(len(into), rows):
            values, total = codes * scales, into[place].view(codes.shape[1:])
            if values.is_cpu:
                add_in_order([*values], total, times)
            else:  # as many kernels whatever the number of ranks
                torch.sum(values, 0, out=total).mul_(times)

    def _rows(self, flat: Tensor, wire: Tensor, counts: Sequence[int]) -> Iterator[tuple[Tensor, Tensor]]:
        """Shares of so many elements and their bytes; all together as rows where they are of one length."""
        lengths = self.lengths(counts)
        if len(set(counts)) == 1:
            yield flat.view(len(counts), counts[0]), wire.view(len(counts), lengths[0])
        elif counts:
            yield from zip(flat.split([*counts]), wire.split(lengths), strict=True)

    def _pieces(self, count: int, wire: Tensor) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Of shares of `count` elements some blocks at a time, and then what is left: where they lie in a share, their
        codes (..., block) and scales (..., 1).

        wire: (..., bytes), the shares in its last dimension.
        """
        whole, left = divmod(count, self.block)
        records = wire.unflatten(-1, (-(-count // self.block), self.block + _SCALE))
        codes, scales = records[..., : self.block].view(torch.int8), records[..., self.block :].view(torch.float32)
        step = max((_IN_CACHE if wire.is_cpu else _ON_GPU) // (self.block * math.prod(wire.shape[:-1])), 1)
        for first in range(0, whole, step):
            last = min(first + step, whole)
            place = slice(first * self.block, last * self.block)
            yield place, codes[..., first:last, :], scales[..., first:last, :]
        if left:
            yield slice(whole * self.block, count), codes[..., whole, :left], scales[..., whole, :]
