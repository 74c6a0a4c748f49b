"""One flat group in bytes, as one rank has it: the arithmetic of FlatGroup and GradBucket over the same Layout."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Literal

import torch

from zero.comm.host_memory import CHUNK
from zero.oss.layout import Layout
from zero.sdp.bucket import travels_alone


@dataclass(frozen=True, slots=True)
class Flat:
    """Bytes on one rank, unless said otherwise.

    computed, stepped: the dtypes of what is computed with and of what is stepped.
    whole, part: the buffer of all parameters, in the dtype that is computed with, and this rank's segment of it in the
        dtype that is stepped.
    gathered: this rank's segment as it is sent.
    owned: elements of trained parameters in the segment, padding left out.
    largest: elements of the largest part of a parameter that any rank has.
    tensors: how many trained parameters the segment has something of.
    taken: of all gradients, whole.
    alone: of those gradients, what is sent each by itself.
    cast: what those take in the dtype that they are sent in, where it is another than they were written in.
    small, small_written: the message of all others, as it is sent, and as it is put together where that differs.
    received: what comes in from all ranks, on its way: nothing where it is read when it is added up.
    pieces: of what is read then, as much as is held at a time.
    widened: what is held besides to add up 16-bit numbers in float32.
    sums: what is left of what came, in `sums_dtype`.
    sent: what leaves this rank.
    """

    computed: torch.dtype
    stepped: torch.dtype
    whole: int
    part: int
    gathered: int
    owned: int
    largest: int
    tensors: int
    taken: int
    alone: int
    cast: int
    small: int
    small_written: int
    received: int
    pieces: int
    widened: int
    sums: int
    sums_dtype: torch.dtype
    sent: int

    @property
    def mastered(self) -> bool:
        """Whether what is stepped is apart from what is computed with in any case, being of another dtype."""
        return self.stepped is not self.computed


@lru_cache(maxsize=64)  # the blocks of a model are alike
def size_up(
    layout: Layout,
    rank: int,
    cut: Literal["even", "whole"],
    *,
    stored: torch.dtype,
    trained: bool,
    computed: torch.dtype | None = None,
    stepped: torch.dtype | None = None,
    sent_as: torch.dtype | None = None,
    reads: bool = False,
) -> Flat:
    """cut: how the layout was made.

    stored: the parameters' own dtype. computed, stepped, sent_as: other dtypes, where there are.

    reads: whether ranks read one another's memory.
    """
    floating = stored.is_floating_point
    computed = computed if computed is not None and floating else stored
    stepped = stepped if stepped is not None and floating else stored
    sent_as = sent_as or computed
    sums_dtype = torch.float32 if sent_as in (torch.float16, torch.bfloat16) else sent_as
    size, world = computed.itemsize, layout.world
    low, high = layout.bounds[rank : rank + 2]
    spans = layout.spans(rank) if trained else ()
    numels = layout.numels if trained else ()
    alone = sum(numel for numel in numels if travels_alone(numel * size))
    largest = _largest_piece(layout, cut) if trained else 0
    own = sum(span.numel for span in spans)
    total = sum(numels)
    large = [span.numel for span in spans if travels_alone(layout.numels[span.index] * size)]
    most = max([own - sum(large), *large])  # of one message, what this rank gets
    at_once = min(most, CHUNK // sent_as.itemsize) if reads else most
    held_to_add_up = 2 * sums_dtype.itemsize * at_once if world > 1 else sent_as.itemsize * own
    return Flat(
        computed=computed,
        stepped=stepped,
        whole=layout.numel * size,
        part=(high - low) * stepped.itemsize,
        gathered=(high - low) * size,
        owned=own,
        largest=largest,
        tensors=len(spans),
        taken=sum(numels) * size,
        alone=alone * size,
        cast=alone * sent_as.itemsize if sent_as is not computed else 0,
        small=(total - alone) * sent_as.itemsize,
        small_written=(total - alone) * size if sent_as is not computed else 0,
        received=own * world * sent_as.itemsize if world > 1 and not reads else 0,
        pieces=at_once * world * sent_as.itemsize if world > 1 and reads else 0,
        widened=held_to_add_up if sums_dtype is not sent_as else 0,
        sums=own * sums_dtype.itemsize,
        sums_dtype=sums_dtype,
        sent=(total - own) * sent_as.itemsize if world > 1 else 0,
    )


def _largest_piece(layout: Layout, cut: Literal["even", "whole"]) -> int:
    """Elements of the largest piece that parameters are cut into, over all ranks."""
    if cut == "whole":
        return max(layout.numels)
    largest = 0
    for start, numel in zip(layout.offsets, layout.numels, strict=True):
        stop = start + numel
        low, high = bisect_right(layout.bounds, start), bisect_left(layout.bounds, stop)
        points = sorted({start, *layout.bounds[low:high], stop})
        largest = max([largest, *(after - before for before, after in pairwise(points))])
    return largest
