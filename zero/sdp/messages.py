"""The messages by which the gradients of one shard group are reduced to their owners.

InOneMessage  one message of all gradients in the layout's order, where transfers overlap with computing (the number of
              launches does not depend on the number of ranks), or where the exchange asks for it
ByOwner       one message for each large gradient, from the memory in which autograd wrote it, and one message of all
              small gradients, ordered by owner: no large gradient is copied
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

import torch
from torch import Tensor

from zero._torch import copy_all
from zero.comm.packing import concatenate, lengths
from zero.comm.transport import Message
from zero.sdp.routes import Routes
from zero.shards.layout import Span
from zero.shards.shard_group import ShardGroup

_LARGE = 1 << 18
"""Bytes from which a gradient is a message by itself. A message costs about as much CPU time as copying this much."""

Gradients = Mapping[int, Tensor]
"""Flat gradients in the order of the layout, by position of the parameter. Missing gradients are sent as zeros."""


class InOneMessage:
    """All gradients in one message. trained: positions of the parameters that have gradients. dtype: the dtype in which
    they are sent. `owned`: this rank's spans of these parameters, in the order of the sums."""

    def __init__(self, group: ShardGroup, trained: Sequence[int], dtype: torch.dtype) -> None:
        self._group, self._dtype = group, dtype
        self.owned = [group.spans[index] for index in trained if index in group.spans]

    @cached_property
    def _lengths(self) -> list[int]:
        """The lengths of the shards, by rank. Computed when needed, because there may be thousands of ranks."""
        return lengths(self._group.layout.bounds)

    def messages(self, taken: Gradients) -> list[Message]:
        """Returns the messages to reduce."""
        layout = self._group.layout
        packed = self._group.full.new_zeros(layout.numel, dtype=self._dtype)
        if taken:
            views = [packed[layout.offsets[i] : layout.offsets[i] + layout.numels[i]] for i in taken]
            copy_all(views, [*taken.values()])
        return [(packed, self._lengths)]

    def cut(self, sums: Tensor) -> list[Tensor]:
        """Returns the sums of each span in `owned`, flat."""
        return [sums[span.offset : span.offset + span.numel] for span in self.owned]


class ByOwner:
    """Sends large gradients without a copy. Arguments and methods are those of InOneMessage."""

    def __init__(self, group: ShardGroup, trained: Sequence[int], dtype: torch.dtype) -> None:
        self._group, self._dtype = group, dtype
        numels, itemsize = group.layout.numels, group.full.element_size()
        self._large = [index for index in trained if numels[index] * itemsize >= _LARGE]
        self._routes = Routes(group.layout, trained, self._large)
        large = set(self._large)
        owned = [group.spans[index] for index in trained if index in group.spans]
        self.owned: list[Span] = sorted(owned, key=lambda span: span.index not in large)

    def messages(self, taken: Gradients) -> list[Message]:
        """Returns the messages to reduce."""
        return [*(self._large_message(index, taken) for index in self._large), self._small_message(taken)]

    def _large_message(self, index: int, taken: Gradients) -> Message:
        """Returns a gradient as a message without a copy: the ranks' shards of it are in rank order."""
        gradient = taken.get(index)
        if gradient is None:
            gradient = self._group.full.new_zeros(self._group.layout.numels[index])
        return gradient.to(self._dtype), self._routes.counts[index]

    def _small_message(self, taken: Gradients) -> Message:
        """Returns a copy of all small gradients, ordered by owner."""
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
        """Returns the sums of each span in `owned`, flat."""
        return [*sums.split([span.numel for span in self.owned])] if self.owned else []


def messages_of(group: ShardGroup, trained: Sequence[int], dtype: torch.dtype) -> InOneMessage | ByOwner:
    """Returns InOneMessage if the group reduces its gradients as one message (`ShardGroup.packs`), else ByOwner."""
    return (InOneMessage if group.packs else ByOwner)(group, trained, dtype)
