"""One flat group in bytes, as one rank has it: the arithmetic of FlatGroup and GradBucket over the same Layout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from zero.oss.layout import Layout
from zero.oss.partition import Arrangement
from zero.sdp.bucket import travels_alone


@dataclass(frozen=True)
class Flat:
    """Bytes on one rank, unless said otherwise.

    names: of the parameters, in the order of the layout.
    whole, part: the buffer of all parameters, in the dtype that is computed with, and this rank's segment of it in the
        dtype that is stepped.
    gathered: this rank's segment as it is sent.
    owned, largest: elements of trained parameters in the segment, padding left out, and of the largest among them.
    tensors: how many trained parameters the segment has something of.
    gradients: of each parameter, whole; 0 where it is not trained.
    alone: of those gradients, what is sent from where autograd wrote it.
    message, small: all that is sent for the gradients, this rank's own share included; of it the message of small ones.
    received, sums: what comes in from all ranks, and what is left of it.
    sent: of the message, what leaves this rank.
    """

    names: tuple[str, ...]
    whole: int
    part: int
    gathered: int
    owned: int
    largest: int
    tensors: int
    gradients: tuple[int, ...]
    alone: int
    message: int
    small: int
    received: int
    sums: int
    sent: int

    @property
    def taken(self) -> int:
        return sum(self.gradients)


def size_up(
    params: Sequence[nn.Parameter],
    names: Sequence[str],
    arranged: Arrangement,
    rank: int,
    *,
    computed: torch.dtype | None = None,
    stepped: torch.dtype | None = None,
    sent_as: torch.dtype | None = None,
) -> Flat:
    """params, names: the list that was arranged. computed, stepped: dtypes, where not the parameters' own."""
    members, layout = [params[i] for i in arranged.members], arranged.layout
    stored, trained = members[0].dtype, members[0].requires_grad
    floating = stored.is_floating_point
    computed = computed if computed is not None and floating else stored
    stepped = stepped if stepped is not None and floating else stored
    sent_as = sent_as or computed
    wide = torch.float32 if sent_as in (torch.float16, torch.bfloat16) else sent_as
    size, world = computed.itemsize, layout.world
    low, high = layout.bounds[rank : rank + 2]
    spans = layout.spans(rank) if trained else ()
    numels = layout.numels if trained else ()
    alone = [numel for numel in numels if travels_alone(numel * size)]
    own = sum(span.numel for span in spans) + len(spans)
    total = sum(numels) + (_pairs(layout) if trained else 0)
    return Flat(
        names=tuple(names[i] for i in arranged.members),
        whole=layout.numel * size,
        part=(high - low) * stepped.itemsize,
        gathered=(high - low) * size,
        owned=own - len(spans),
        largest=max((span.numel for span in spans), default=0),
        tensors=len(spans),
        gradients=tuple(numel * size if trained else 0 for numel in layout.numels),
        alone=sum(alone) * size,
        message=total * sent_as.itemsize,
        small=(total - sum(alone)) * sent_as.itemsize,
        received=own * world * sent_as.itemsize if world > 1 else 0,
        sums=own * (wide if world > 1 else sent_as).itemsize,
        sent=(total - own) * sent_as.itemsize if world > 1 else 0,
    )


def _pairs(layout: Layout) -> int:
    """How many (rank, parameter) there are of which the rank has something of the parameter."""
    cuts = np.unique(np.asarray(layout.bounds[1:-1], dtype=np.int64))
    offsets, numels = np.asarray(layout.offsets, dtype=np.int64), np.asarray(layout.numels, dtype=np.int64)
    around = np.searchsorted(offsets, cuts, side="right") - 1
    within = (cuts > offsets[around]) & (cuts < offsets[around] + numels[around])
    return len(numels) + int(within.sum())
