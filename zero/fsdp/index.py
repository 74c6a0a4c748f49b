"""The places of one model's parameters in its shard groups and units."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from torch import nn

from zero.fsdp.unit import Unit
from zero.shards.partition import Place, places_in
from zero.shards.shard_group import ShardGroup


class Index(Mapping[nn.Parameter, Place]):
    """Maps each parameter to its shard group and position. `units`: the root first; `groups`: those of all units."""

    def __init__(self, units: Sequence[Unit]) -> None:
        self.units = units
        self.groups: list[ShardGroup] = [group for unit in units for group in unit.groups]
        self._places = places_in(self.groups)
        self._units = {group: unit for unit in units for group in unit.groups}

    def unit_of(self, param: nn.Parameter) -> Unit:
        return self._units[self._places[param].group]

    def __getitem__(self, param: nn.Parameter) -> Place:
        return self._places[param]

    def __contains__(self, param: object) -> bool:
        return param in self._places

    def __iter__(self) -> Iterator[nn.Parameter]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)
