"""A wire: quantises tensors to 8-bit integers, block by block (ZeRO++: qwZ, qgZ; Wang et al., arXiv 2306.10209,
section 3).

    share    a flat tensor that one rank sends another: a shard of parameters, or of a gradient
    wire     the shares as uint8: one record after another, each of `block` codes (int8) and their scale (float32). The
             last block of a share is padded with zeros, so every share begins with a record

An element is rounded to the nearest multiple of the scale, its code; the scale is 1/127 of the largest magnitude in the
block. So the error is at most 1/254 of that magnitude, plus the rounding of the dtype into which it is decoded.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from zero.comm import Comm, Handle, Wire
from zero.comm.packing import add_in_order, lengths
from zero.comm.transport import Message
from zero.comm.wire import NAMES

QUANTISED = (torch.float32, torch.bfloat16, torch.float16)
"""The dtypes that can be quantised. For others 8 bits are too few, or the range of the scale is too small."""

_SCALE = 4
"""Bytes of a scale."""

_STEP = (1 - 2**-22) / 127
"""Scale of a block by its largest magnitude. Rounded down, so that no decoded element exceeds that and overflows."""

_SMALLEST = 2.0**-118
"""Smallest magnitude from which a scale is computed, so that scales are normal numbers."""

_IN_CACHE, _ON_GPU = 1 << 18, 1 << 24
"""Elements to process at a time, which keeps temporaries small; more on GPUs, so that few kernels are launched."""


@dataclass(frozen=True)
class Int8(Wire):
    """Quantisation for transfers, in place of a dtype: 8-bit integers with one float32 scale for each block of `block`
    elements, so (1 + 4 / block) bytes an element.

    A block that contains NaN is received as NaN. A block that contains infinities is received with these infinities and
    NaN elsewhere. Raises ValueError unless `block` is a positive multiple of 8.
    """

    block: int = 256

    itemsize = 1  # without its scale, as for a dtype

    def __post_init__(self) -> None:
        if isinstance(self.block, bool) or not isinstance(self.block, int) or self.block < 1 or self.block % 8:
            raise ValueError(f"Int8(block={self.block!r}): pass a block of a positive multiple of 8, such as 256.")

    def gather(self, comm: Comm, full: Tensor, bounds: Sequence[int], channel: int, *, keeps_own: bool) -> Handle:
        """See Wire.gather. Integers are sent as they are, and a group of one rank rounds nothing."""
        if comm.world == 1 or not full.is_floating_point():
            return comm.gather(full, bounds, channel)
        counts, rank = lengths(bounds), comm.rank
        starts = [0, *accumulate(self.lengths(counts))]
        wire = full.new_empty(starts[-1], dtype=torch.uint8)
        wire[starts[rank] : starts[rank + 1]] = self.encode(full[bounds[rank] : bounds[rank + 1]], [counts[rank]])
        handle = comm.gather(wire, starts, channel)
        decoded = [(0, rank), (rank + 1, comm.world)] if keeps_own else [(0, comm.world)]

        def finish() -> None:
            handle.wait()
            for first, last in decoded:
                self.decode(wire[starts[first] : starts[last]], full[bounds[first] : bounds[last]], counts[first:last])

        return Handle(finish)

    def reduce(self, comm: Comm, messages: Sequence[Message], times: float, channel: int) -> Handle:
        """See Wire.reduce. The sums are float32."""
        if comm.world == 1:
            return comm.reduce(messages, times=times, channel=channel)
        own, device = [counts[comm.rank] for _, counts in messages], messages[0][0].device
        sent = [(self.encode(message, counts), self.lengths(counts)) for message, counts in messages]
        received = comm.all_to_all(sent, channel)

        def finish() -> Tensor:
            sums = torch.empty(sum(own), dtype=torch.float32, device=device)
            for rows, into in zip(received.wait(), sums.split(own), strict=True):
                self.add(rows, into, times)
            return sums

        return Handle(finish)

    def across(self) -> Int8:
        return self

    def arrives_as(self, shard: Tensor) -> Tensor:
        return self.rounded(shard) if shard.is_floating_point() else shard

    def problem(self, name: str, dtype: torch.dtype, option: str) -> str | None:
        """See Wire.problem. Integers pass: they are sent as they are."""
        if not (dtype.is_floating_point or dtype.is_complex) or dtype in QUANTISED:
            return None
        return (
            f"{name} is {dtype}, but {option}={self} quantises float32, bfloat16 and float16 only. Cast the model to "
            f"one of these, or leave {option} out."
        )

    def lengths(self, counts: Iterable[int]) -> list[int]:
        """Returns the encoded bytes of shares of `counts` elements."""
        return [-(-count // self.block) * (self.block + _SCALE) for count in counts]

    def encode(self, flat: Tensor, counts: Sequence[int]) -> Tensor:
        """Returns the wire of a flat tensor that consists of shares of `counts` elements."""
        wire = flat.new_zeros(sum(self.lengths(counts)), dtype=torch.uint8)
        for shares, encoded in self._rows(flat, wire, counts):
            for elements, codes, scales in self._chunks(shares.shape[-1], encoded):
                values = shares[..., elements].view(codes.shape)
                largest = values.abs().amax(-1, keepdim=True).float()  # torch.aminmax takes ten times as long
                scales.copy_(largest.clamp_(min=_SMALLEST).mul_(_STEP))
                finite = scales.clamp(max=torch.finfo(scales.dtype).max)  # infinities divided by it stay infinite
                codes.copy_(values.div(finite).round_().clamp_(-127, 127))
        return wire

    def decode(self, wire: Tensor, into: Tensor, counts: Sequence[int]) -> None:
        """Overwrites `into` with the decoded shares of `counts` elements."""
        for shares, encoded in self._rows(into, wire, counts):
            for elements, codes, scales in self._chunks(shares.shape[-1], encoded):
                shares[..., elements].view(codes.shape).copy_(codes).mul_(scales)

    def rounded(self, flat: Tensor) -> Tensor:
        """Returns a share as the other ranks receive it, as a new tensor."""
        decoded = torch.empty_like(flat)
        self.decode(self.encode(flat, [len(flat)]), decoded, [len(flat)])
        return decoded

    def add(self, rows: Tensor, into: Tensor, times: float) -> None:
        """Overwrites `into` (float32) with `times` the sum of all ranks' shares; on the CPU added in rank order.

        rows: (ranks, bytes), the encoded share of each rank.
        """
        for elements, codes, scales in self._chunks(len(into), rows):
            values, total = codes * scales, into[elements].view(codes.shape[1:])
            if values.is_cpu:
                add_in_order([*values], total, times)
            else:  # the number of kernels does not depend on the number of ranks
                torch.sum(values, 0, out=total).mul_(times)

    def _rows(self, flat: Tensor, wire: Tensor, counts: Sequence[int]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields each share with its bytes, or all of them as the rows of two matrices if they have the same length."""
        lengths = self.lengths(counts)
        if len(set(counts)) == 1:
            yield flat.view(len(counts), counts[0]), wire.view(len(counts), lengths[0])
        elif counts:
            yield from zip(flat.split([*counts]), wire.split(lengths), strict=True)

    def _chunks(self, count: int, wire: Tensor) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Yields several full blocks of shares of `count` elements at a time, and the last incomplete block: their
        slice of a share, their codes (..., block) and their scales (..., 1).

        wire: (..., bytes), with the shares in its last dimension.
        """
        full, left = divmod(count, self.block)
        records = wire.unflatten(-1, (-(-count // self.block), self.block + _SCALE))
        codes, scales = records[..., : self.block].view(torch.int8), records[..., self.block :].view(torch.float32)
        step = max((_IN_CACHE if wire.is_cpu else _ON_GPU) // (self.block * math.prod(wire.shape[:-1])), 1)
        for first in range(0, full, step):
            last = min(first + step, full)
            elements = slice(first * self.block, last * self.block)
            yield elements, codes[..., first:last, :], scales[..., first:last, :]
        if left:
            yield slice(full * self.block, count), codes[..., full, :left], scales[..., full, :]


NAMES.append("zero.Int8()")
