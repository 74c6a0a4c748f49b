"""The shard of one parameter that one rank owns, and its slice of the optimizer's state: elements of an entry with the
parameter's shape, and single values, such as a step count, which are the same for all shards.
"""

from __future__ import annotations

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
    empty: the rank owns nothing, and the optimizer steps an empty shard.
    """

    number: int
    group: ShardGroup
    index: int
    owner: int
    span: Span
    empty: bool = False

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
        return shard_shape(self.full_shape, self.span.numel) if self.cut or self.empty else self.full_shape

    def slot(self, full: Tensor) -> Tensor:
        """This shard's elements of a full tensor, which has the parameter's shape; flat.

        A view if the elements lie in memory in the order of the layout, otherwise a copy.
        """
        return self.group.shapes.in_memory_order(self.index, full)[self.span.start : self.span.stop]

    def taken_from(self, value: Any, *, is_shard: bool) -> Any:
        """Copies this shard's slice of a leaf of the state. is_shard: the leaf is the slice already."""
        if not isinstance(value, Tensor):
            return value
        if is_shard or not self.cut or value.numel() == 1:
            return leaves.copied(value)
        return self.slot(value).clone().view(self.shape)
