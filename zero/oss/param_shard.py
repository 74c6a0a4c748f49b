"""What one rank owns of one parameter, and which part of the optimizer's state that is.

The state of a parameter that is cut is cut with it: an entry of the parameter's shape into elements, and one that has a
row for each block of so many elements (a divisor of the granularity, of which cuts are multiples) into rows. A single
value (a step count) is the same for all shards.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from zero.measure.shapes import shard_shape
from zero.oss import leaves
from zero.oss.layout import Span
from zero.oss.shard_group import ShardGroup


@dataclass(frozen=True)
class ParamShard:
    """Elements [span.start, span.stop) of a parameter, which rank `owner` owns.

    number: of the parameter, counted through all groups of the optimizer. flat, index: where it lies.
    granularity: elements of which cuts inside parameters are multiples, if the user said so.
    """

    number: int
    flat: ShardGroup
    index: int
    owner: int
    span: Span
    granularity: int | None

    @property
    def param(self) -> nn.Parameter:
        return self.flat.params[self.index]

    @property
    def name(self) -> str:
        return self.flat.names[self.index]

    @property
    def full_shape(self) -> torch.Size:
        """The parameter's shape when full."""
        return self.flat.shapes.full[self.index]

    @property
    def cut(self) -> bool:
        return self.span.numel < self.flat.layout.numels[self.index]

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the tensor that the owner steps."""
        return shard_shape(self.full_shape, self.span.numel) if self.cut else self.full_shape

    def rows(self, total: int) -> slice | None:
        """Which rows are this shard's of a tensor that has one for each block, `total` in all; None if it has not.

        A parameter that is cut has more elements than the granularity: two divisors of it then give different totals.
        """
        numel = self.flat.layout.numels[self.index]
        for block in _divisors(self.granularity or 0):
            if -(-numel // block) == total:
                return slice(self.span.start // block, -(-self.span.stop // block))
        return None

    def slot(self, full: Tensor) -> Tensor:
        """Where this shard lies in a full tensor, of the parameter's shape or of rows by blocks.

        A flat view where memory has the elements in the order of the layout, and a copy otherwise.
        """
        if full.shape == self.full_shape:
            return self.flat.shapes.in_memory_order(self.index, full)[self.span.start : self.span.stop]
        rows = self.rows(len(full))
        assert rows is not None
        return full[rows].reshape(-1)

    def taken_from(self, value: Any, *, is_shard: bool) -> Any:
        """A copy of what this shard has of an entry of a state. is_shard: the state is of the shard alone."""
        if type(value) in (list, tuple):
            return type(value)(self.taken_from(item, is_shard=is_shard) for item in value)
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
