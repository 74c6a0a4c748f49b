"""A model laid out for a number of ranks as OSS and FSDP lay it out, by the functions that they call for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from zero.oss.partition import Arrangement, arrange, bucket_limit, cut_for
from zero.plan.flat import Flat, size_up
from zero.plan.sizes import Group, Options, Sizes

_FEW = 8
"""Ranks of which each is looked at where they own unequally much; of more, those that own most."""


class Kept(NamedTuple):
    """A parameter as stages 0 to 2 keep it: of the dtype that is computed with. stepped: the master's, or the same."""

    name: str
    param: nn.Parameter
    numel: int
    nbytes: int
    trained: bool
    stepped: torch.dtype
    mastered: bool


@dataclass(frozen=True)
class Bucket:
    """A flat group on one rank, and what is stepped of it: the parameters themselves, or masters."""

    flat: Flat
    stepped: torch.dtype
    mastered: bool = False


@dataclass
class Layouts:
    sizes: Sizes
    world: int
    optim: Callable[..., Optimizer]
    options: Options

    @cached_property
    def kept(self) -> list[Kept]:
        """The parameters, in the model's order."""
        computed = {name: group.dtype for group in self.sizes.groups for name in group.names}
        kept = []
        for name, param in self.sizes.params.items():
            stored, trained, cast = param.dtype, param.requires_grad, param
            wanted = computed.get(name)
            dtype = wanted if wanted is not None and stored.is_floating_point else stored
            if dtype is not stored:
                cast = nn.Parameter(torch.empty_like(param, dtype=dtype, device="meta"), requires_grad=trained)
            master = self.options.master_dtype or stored
            wider = dtype.is_floating_point and master.itemsize > dtype.itemsize
            numel, stepped = param.numel(), master if wider else dtype
            kept.append(Kept(name, cast, numel, numel * dtype.itemsize, trained, stepped, wider))
        return kept

    @cached_property
    def _buckets(self) -> list[Arrangement]:
        params = [one.param for one in self.kept[::-1]]
        return arrange(
            params,
            self.world,
            cut=cut_for(self.options.partition, self.optim, self.options.granularity),
            loads=[0] * self.world,
            granularity=self.options.granularity,
            limit=self.options.bucket_bytes or bucket_limit(params),
        )

    @cached_property
    def _units(self) -> list[tuple[Group, Arrangement]]:
        cut: Literal["even", "whole"] = "whole" if cut_for(self.options.partition, self.optim) == "whole" else "even"
        loads = [0] * self.world
        return [
            (group, one)
            for group in self.sizes.groups
            for one in arrange(group.params, self.world, cut=cut, loads=loads)
        ]

    def buckets(self, rank: int) -> list[Bucket]:
        """The flat groups of OSS, in the order in which they are filled."""
        kept = self.kept[::-1]
        params, names = [one.param for one in kept], [one.name for one in kept]
        buckets = []
        for one in self._buckets:
            first = kept[one.members[0]]
            flat = size_up(params, names, one, rank, stepped=first.stepped, sent_as=self.options.reduce_dtype)
            buckets.append(Bucket(flat, first.stepped, first.mastered))
        return buckets

    def units(self, rank: int) -> dict[str, list[Bucket]]:
        """The flat groups of FSDP's units; the root unit is first."""
        units: dict[str, list[Bucket]] = {"": []}
        for group, one in self._units:
            sent_as = self.options.precision.reduce_dtype
            flat = size_up(group.params, group.names, one, rank, computed=group.dtype, sent_as=sent_as)
            units.setdefault(group.unit, []).append(Bucket(flat, group.params[one.members[0]].dtype))
        return units

    def fullest(self) -> list[int]:
        """The ranks among which the one is that needs most: of all, and for its largest bucket."""
        even = cut_for(self.options.partition, self.optim, self.options.granularity) == "even"
        if even and self.options.granularity is None:
            return [0]  # segments are equal, and padding is at the end
        if self.world <= _FEW:
            return [*range(self.world)]
        loads, largest = np.zeros(self.world, dtype=np.int64), np.zeros(self.world, dtype=np.int64)
        for one in self._buckets:
            bounds = np.asarray(one.layout.bounds, dtype=np.int64)
            segments = (bounds[1:] - bounds[:-1]) * self.kept[::-1][one.members[0]].stepped.itemsize
            loads += segments
            largest = np.maximum(largest, segments)
        return sorted({int(loads.argmax()), int(largest.argmax())})
