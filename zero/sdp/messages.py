"""How the gradients of one group travel to their owners.

InOneMessage  all in the layout's order, where transfers overlap with the computing: what is launched does not grow
              with the ranks
ByOwner       each large gradient by itself, from where autograd wrote it, and the small ones together, by owner:
              nothing large is copied
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor

from zero._torch import copy_all
from zero.comm.packing import concatenate
from zero.comm.transport import Message
from zero.oss.layout import Span
from zero.oss.shard_group import ShardGroup
from zero.sdp.routes import Routes

_LARGE = 1 << 18
"""Bytes from which a gradient travels by itself. A message costs about as much CPU time as copying this."""

Gradients = Mapping[int, Tensor]
"""By position of the parameter, flat, in the order of the layout; those of other parameters are zeros."""


class InOneMessage:
    """trained: positions of the parameters that have gradients. dtype: in which they travel.

    `owned`: what this rank owns of them, in the order in which the sums come.
    """

    def __init__(self, group: ShardGroup, trained: Sequence[int], dtype: torch.dtype) -> None:
        self._group, self._dtype = group, dtype
        self.owned = [group.spans[index] for index in trained if index in group.spans]

    @cached_property
    def _lengths(self) -> list[int]:
        """Of the shards, by rank; not before they are needed, as they may be thousands."""
        return [high - low for low, high in pairwise(self._group.layout.bounds)]

    def messages(self, taken: Gradients) -> list[Message]:
        """What goes to the ranks."""
        layout = self._group.layout
        packed = self._group.full.new_zeros(layout.numel, dtype=self._dtype)
        if taken:
            places = [packed[layout.offsets[i] : layout.offsets[i] + layout.numels[i]] for i in taken]
            copy_all(places, [*taken.values()])
        return [(packed, self._lengths)]

    def cut(self, sums: Tensor) -> list[Tensor]:
        """What came of each parameter that is `owned`, flat."""
        return [sums[span.offset : span.offset + span.numel] for span in self.owned]


class ByOwner:
    """As InOneMessage."""

    def __init__(self, group: ShardGroup, trained: Sequence[int], dtype: torch.dtype) -> None:
        self._group, self._dtype = group, dtype
        numels, itemsize = group.layout.numels, group.full.element_size()
        self._large = [index for index in trained if numels[index] * itemsize >= _LARGE]
        self._routes = Routes(group.layout, trained, self._large)
        alone = set(self._large)
        owned = [group.spans[index] for index in trained if index in group.spans]
        self.owned: list[Span] = sorted(owned, key=lambda span: span.index not in alone)

    def messages(self, taken: Gradients) -> list[Message]:
        """What goes to the ranks."""
        return [*(self._alone(index, taken) for index in self._large), self._together(taken)]

    def _alone(self, index: int, taken: Gradients) -> Message:
        """A gradient as it is: what each rank owns of it lies in the order of ranks."""
        gradient = taken.get(index)
        if gradient is None:
            gradient = self._group.full.new_zeros(self._group.layout.numels[index])
        return gradient.to(self._dtype), self._routes.counts[index]

    def _together(self, taken: Gradients) -> Message:
        sample = self._group.full
        shares = [sample[:0]]
        for index, start, stop in self._routes.together.shares:
            gradient = taken.get(index)
            if gradient is None:
                gradient = sample.new_zeros(stop - start)
            elif stop - start < gradient.numel():
                gradient = gradient[start:stop]
            shares.append(gradient)
        return concatenate(shares).to(self._dtype), self._routes.together.counts

    def cut(self, sums: Tensor) -> list[Tensor]:
        """What came of each parameter that is `owned`, flat."""
        return [*sums.split([span.numel for span in self.owned])] if self.owned else []


def messages_of(group: ShardGroup, trained: Sequence[int], dtype: torch.dtype) -> InOneMessage | ByOwner:
    return (InOneMessage if group.packs else ByOwner)(group, trained, dtype)
