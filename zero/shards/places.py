"""Where parameters lie: in which shard group, and at which position of it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from torch import nn

from zero.shards.layout import Span
from zero.shards.shard_group import ShardGroup


class Place(NamedTuple):
    """The shard group of a parameter, and its position there."""

    group: ShardGroup
    position: int

    @property
    def name(self) -> str:
        return self.group.names[self.position]

    @property
    def span(self) -> Span | None:
        """The elements that this rank owns; None if it owns none."""
        return self.group.spans.get(self.position)


def places_in(groups: Iterable[ShardGroup]) -> dict[nn.Parameter, Place]:
    """The places of all parameters of the groups."""
    return {param: Place(group, i) for group in groups for i, param in enumerate(group.params)}
