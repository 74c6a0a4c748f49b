"""The messages by which the gradients of one shard group are reduced to their owners.

InOneMessage  one message of all gradients in the layout's order, where transfers overlap with computing: the number of
              launches does not depend on the number of ranks
ByOwner       one message for each large gradient, from the memory in which autograd wrote it, and one message of all
              small gradients, ordered by owner: no large gradient is copied
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor

from zero._torch.tensors import foreach
from zero.comm.packing import concatenate, lengths
from zero.comm.transport import Message
from zero.shards.shard_group import ShardGroup

# Bytes from which a gradient is a message by itself. A message costs about as much CPU time as copying this much.
_LARGE = 1 << 18

Gradients = Mapping[int, Tensor]
"""Flat gradients in the order of the layout, by position of the parameter. Missing gradients are sent as zeros."""


class InOneMessage:
    """All gradients in one message. trained: positions of the parameters that have gradients. dtype: the dtype in which
    they are sent."""

    def __init__(self, group: ShardGroup, trained: Sequence[int], dtype: torch.dtype) -> None:
        self._group, self._dtype, self._numel = group, dtype, group.layout.numel
        owned = [group.shapes.spans[index] for index in trained if index in group.shapes.spans]
        self._owned = [(span.index, slice(span.offset, span.offset + span.numel)) for span in owned]
        starts = [*group.layout.offsets, group.layout.numel]
        lengths_with_padding = [after - start for start, after in pairwise(starts)]
        # The lengths of the padding before the first gradient, and of gradients and of the padding after each, in turn.
        self._pieces = [starts[0]]
        for numel, both in zip(group.layout.numels, lengths_with_padding, strict=True):
            self._pieces += numel, both - numel
        self._padding = {number for number, size in enumerate(self._pieces) if size and not number % 2}

    @cached_property
    def _lengths(self) -> list[int]:
        """The lengths of the shards, by rank. Computed when needed, because there may be thousands of ranks."""
        return lengths(self._group.layout.bounds)

    def messages(self, taken: Gradients) -> list[Message]:
        """Returns the messages to reduce."""
        packed = self._group.full.new_empty(self._numel, dtype=self._dtype)
        views = packed.split(self._pieces)
        missing = {2 * index + 1 for index in range(len(views) // 2) if index not in taken}
        if missing or self._padding:
            foreach("zero_", [views[number] for number in sorted(self._padding | missing)])
        if taken:
            foreach("copy_", [views[2 * index + 1] for index in taken], [*taken.values()])
        return [(packed, self._lengths)]

    def cut(self, sums: Tensor) -> Iterable[tuple[int, Tensor]]:
        """Returns the flat sums of what this rank owns of trained parameters, with their positions."""
        return [(index, sums[own]) for index, own in self._owned]


class ByOwner:
    """Sends large gradients without a copy. Arguments and methods are those of InOneMessage."""

    def __init__(self, group: ShardGroup, trained: Sequence[int], dtype: torch.dtype) -> None:
        self._group, self._dtype = group, dtype
        numels, itemsize = group.layout.numels, group.full.element_size()
        large = {index for index in trained if numels[index] * itemsize >= _LARGE}
        self._large = [index for index in trained if index in large]
        self._small = [index for index in trained if index not in large]
        self._owned = [index for index in (*self._large, *self._small) if index in group.shapes.spans]
        self._numels = [group.shapes.spans[index].numel for index in self._owned]

    # What grows with the number of ranks is computed only when the first gradients are sent.

    @cached_property
    def _large_counts(self) -> list[list[int]]:
        """The number of elements that go to each rank, for each large gradient."""
        layout = self._group.layout
        counts = [[0] * layout.world for _ in self._large]
        for index, to_ranks in zip(self._large, counts, strict=True):
            for rank, start, stop in layout.owners(index):
                to_ranks[rank] = stop - start
        return counts

    @cached_property
    def _shares(self) -> tuple[list[tuple[int, int, int]], list[int]]:
        """The shares of small gradients in rank order, as (index, start, stop), and the number of elements a rank."""
        layout = self._group.layout
        by_rank: list[list[tuple[int, int, int]]] = [[] for _ in range(layout.world)]
        for index in self._small:
            for rank, start, stop in layout.owners(index):
                by_rank[rank].append((index, start, stop))
        counts = [sum(stop - start for _, start, stop in shares) for shares in by_rank]
        return [share for shares in by_rank for share in shares], counts

    def messages(self, taken: Gradients) -> list[Message]:
        """Returns the messages to reduce."""
        sample, (shares, counts) = self._group.full, self._shares
        messages: list[Message] = []
        for index, to_ranks in zip(self._large, self._large_counts, strict=True):
            gradient = taken.get(index)
            if gradient is None:
                gradient = sample.new_zeros(self._group.layout.numels[index])
            messages.append((gradient.to(self._dtype), to_ranks))  # the ranks' shards of it are in rank order
        small = [sample[:0]]
        for index, start, stop in shares:
            gradient = taken.get(index)
            if gradient is None:
                gradient = sample.new_zeros(stop - start)
            small.append(gradient if len(gradient) == stop - start else gradient[start:stop])
        return [*messages, (concatenate(small).to(self._dtype), counts)]

    def cut(self, sums: Tensor) -> Iterable[tuple[int, Tensor]]:
        return zip(self._owned, sums.split(self._numels), strict=True) if self._owned else ()


def messages_of(group: ShardGroup, trained: Sequence[int], dtype: torch.dtype) -> InOneMessage | ByOwner:
    """Returns InOneMessage where transfers overlap with computing (`ShardGroup.overlaps`), else ByOwner."""
    return (InOneMessage if group.overlaps else ByOwner)(group, trained, dtype)
