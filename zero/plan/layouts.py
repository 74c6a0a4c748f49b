"""A model laid out for a number of ranks as OSS and FSDP lay it out, by the functions that they call for it."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
import torch
from torch.optim import Optimizer

from zero.measure.kinds import finding_of
from zero.oss.layout import Layout
from zero.oss.partition import Arrangement, arrange, bucket_limit, cut_for
from zero.plan.course import Course, Moment
from zero.plan.flat import Flat, size_up
from zero.plan.kept import Kept, Kind
from zero.plan.sizes import Group, Options, Sizes

_FEW = 8
"""Ranks of which each is looked at where they own unequally much; of more, those that own most."""


@dataclass
class Layouts:
    """kept: the parameters of `sizes` as stages 0 to 2 keep them. course: of the step."""

    sizes: Sizes
    kept: Kept
    course: Course
    world: int
    optim: Callable[..., Optimizer]
    options: Options

    @property
    def _cut(self) -> Literal["even", "whole"]:
        granularity = self.options.granularity
        return cut_for(self.options.partition, finding_of(self.optim, granularity=granularity), granularity)

    @property
    def _cut_of_units(self) -> Literal["even", "whole"]:
        return cut_for(self.options.partition, finding_of(self.optim))

    @cached_property
    def _buckets(self) -> list[Arrangement]:
        params = self.kept.params[::-1]
        return arrange(
            params,
            self.world,
            cut=self._cut,
            loads=np.zeros(self.world, dtype=np.int64),
            granularity=self.options.granularity,
            limit=self.options.bucket_bytes or bucket_limit(params),
        )

    @cached_property
    def _units(self) -> list[tuple[Group, Arrangement]]:
        loads = np.zeros(self.world, dtype=np.int64)
        return [
            (group, one)
            for group in self.sizes.groups
            for one in arrange(group.params, self.world, cut=self._cut_of_units, loads=loads)
        ]

    def gradients_in_buckets(self) -> Iterable[Moment]:
        return self.course.gradients_in([one.members for one in self._buckets])

    def _kind(self, bucket: Arrangement) -> Kind:
        return self.kept.kind_of[-1 - bucket.members[0]]  # buckets count from the last

    def buckets(self, rank: int) -> list[Flat]:
        """The flat groups of OSS, in the order in which they are filled."""
        return [
            size_up(
                bucket.layout,
                rank,
                self._cut,
                stored=kind.computed,
                trained=kind.trained,
                stepped=kind.stepped,
                sent_as=self.options.reduce_dtype,
                reads=self.options.reads,
            )
            for bucket, kind in zip(self._buckets, map(self._kind, self._buckets), strict=True)
        ]

    def units(self, rank: int) -> list[list[Flat]]:
        """The flat groups of FSDP's units; the root unit is first."""
        numbers = self.sizes.units
        units: list[list[Flat]] = [[] for _ in numbers]
        for group, one in self._units:
            first = group.params[one.members[0]]
            flat = size_up(
                one.layout,
                rank,
                self._cut_of_units,
                stored=first.dtype,
                trained=first.requires_grad,
                computed=group.dtype,
                sent_as=self.options.precision.reduce_dtype,
                reads=self.options.reads,
            )
            units[numbers[group.unit]].append(flat)
        return units

    def fullest(self, stage: str) -> list[int]:
        """The ranks among which the one is that needs most."""
        if stage == "0":
            return [0]
        return self._fullest_of_units if stage.startswith("3") else self._fullest_of_buckets

    @cached_property
    def _fullest_of_buckets(self) -> list[int]:
        if self._cut == "even" and self.options.granularity is None:
            return self._of_equals(self.options.reduce_dtype or kind.computed for kind in self.kept.kinds)
        return self._fullest((one.layout, self._kind(one).stepped.itemsize) for one in self._buckets)

    @cached_property
    def _fullest_of_units(self) -> list[int]:
        if self._cut_of_units == "even":
            sent_as = self.options.precision.reduce_dtype
            return self._of_equals(sent_as or group.dtype or group.params[0].dtype for group in self.sizes.groups)
        return self._fullest((one.layout, group.params[one.members[0]].itemsize) for group, one in self._units)

    def _of_equals(self, sent: Iterable[torch.dtype]) -> list[int]:
        """Where segments are equal, and padding is at the end. What it takes to add up gradients that are read, or of
        16 bits, depends on how large a piece of one message a rank has, which matters where there are few ranks."""
        differ = self.options.reads or any(dtype in (torch.float16, torch.bfloat16) for dtype in sent)
        return [*range(self.world)] if differ and self.world <= _FEW else [0]

    def _fullest(self, layouts: Iterable[tuple[Layout, int]]) -> list[int]:
        """Of layouts, each with the bytes of an element: the rank that owns most of all, and most of one."""
        if self.world <= _FEW:
            return [*range(self.world)]
        total, largest = [0] * self.world, [0] * self.world
        for layout, itemsize in layouts:
            for rank, numel in _occupied(layout):
                nbytes = numel * itemsize
                total[rank] += nbytes
                if nbytes > largest[rank]:
                    largest[rank] = nbytes
        first = max(range(self.world), key=lambda rank: (total[rank], largest[rank]))
        return [first] if largest[first] == max(largest) else [first, largest.index(max(largest))]


def _occupied(layout: Layout) -> Iterator[tuple[int, int]]:
    """The ranks that own anything, and how many elements."""
    bounds, world, rank = layout.bounds, layout.world, 0
    while (rank := bisect_right(bounds, bounds[rank], rank) - 1) < world:
        yield rank, bounds[rank + 1] - bounds[rank]
        rank += 1
