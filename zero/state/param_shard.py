"""The shard of one parameter that one rank owns, and its slice of the optimizer's state: elements of an entry with the
parameter's shape, rows of an entry with one for each block of elements (whose size divides the granularity), and single
values, such as a step count, which are the same for all shards.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from zero.measure.shapes import shard_shape
from zero.shards.layout import Span
from zero.shards.shard_group import ShardGroup
from zero.state import leaves


@dataclass(frozen=True)
class ParamShard:
    """Elements [span.start, span.stop) of a parameter, which rank `owner` owns.

    number: position of the parameter in all groups of the optimizer. group, index: its shard group and place there.
    granularity: elements; cuts inside parameters are multiples of it. None if the user gave none.
    """

    number: int
    group: ShardGroup
    index: int
    owner: int
    span: Span
    granularity: int | None

    @property
    def param(self) -> nn.Parameter:
        return self.group.params[self.index]

    @property
    def name(self) -> str:
        return self.group.names[self.index]

    @property
    def full_shape(self) -> torch.Size:
        """The shape of the full parameter."""
        return self.group.shapes.full[self.index]

    @property
    def cut(self) -> bool:
        return self.span.numel < self.group.layout.numels[self.index]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the tensor that the owner steps."""
        return shard_shape(self.full_shape, self.span.numel) if self.cut else self.full_shape

    def rows(self, total: int) -> slice | None:
        """This shard's rows of a tensor with `total` rows, one for each block; None if no block size gives so many.

        A cut parameter has more elements than the granularity, so two block sizes give different totals.
        """
        numel = self.group.layout.numels[self.index]
        for block in _divisors(self.granularity or 0):
            if -(-numel // block) == total:
                return slice(self.span.start // block, -(-self.span.stop // block))
        return None

    def slot(self, full: Tensor) -> Tensor:
        """This shard's elements of a full tensor, which has the parameter's shape or a row for each block; flat.

        A view if the elements lie in memory in the order of the layout, otherwise a copy.
        """
        if full.shape == self.full_shape:
            return self.group.shapes.in_memory_order(self.index, full)[self.span.start : self.span.stop]
        rows = self.rows(len(full))
        assert rows is not None
        return full[rows].reshape(-1)

    def taken_from(self, value: Any, *, is_shard: bool) -> Any:
        """Copies this shard's slice of a leaf of the state. is_shard: the leaf is the slice already."""
        if not isinstance(value, Tensor):
            return value
        if is_shard or not self.cut or value.dim() == 0:
            return leaves.copied(value)
        shape = self.shape if value.shape == self.full_shape else (-1, *value.shape[1:])
        return self.slot(value).clone().view(shape)


def _divisors(number: int) -> Iterator[int]:
    for low in range(1, math.isqrt(number) + 1):
        if number % low == 0:
            yield from {low, number // low}
