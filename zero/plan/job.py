"""One model, optimizer and set of options, seen from one rank."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import torch

from zero.fsdp import Prefetch
from zero.measure.kinds import ELEMENTWISE, unwrapped
from zero.oss.slices import SLICE
from zero.plan.course import Course
from zero.plan.flat import Flat
from zero.plan.kept import Kept
from zero.plan.layouts import Layouts
from zero.plan.needs import OptimizerNeeds, measure_optimizer

Needs = dict[torch.dtype, OptimizerNeeds]


@dataclass
class Job:
    """needs: of the optimizer, by the dtype that it steps; measured where they are missing."""

    layouts: Layouts
    rank: int
    prefetch: Prefetch
    needs: Needs

    @property
    def world(self) -> int:
        return self.layouts.world

    @property
    def gloo(self) -> bool:
        return self.layouts.options.backend == "gloo"

    @cached_property
    def agreement(self) -> tuple[int, int]:
        """Bytes held and sent where operations are compared between ranks: too few to count."""
        return 0, 0

    @property
    def course(self) -> Course:
        return self.layouts.course

    @property
    def kept(self) -> Kept:
        """The parameters of stages 0 to 2."""
        return self.layouts.kept

    @property
    def buffers(self) -> int:
        return self.layouts.sizes.buffers

    @property
    def messages(self) -> tuple[int, ...]:
        """Of buffers."""
        return self.layouts.sizes.messages

    @cached_property
    def buckets(self) -> list[Flat]:
        """Of OSS."""
        return self.layouts.buckets(self.rank)

    @cached_property
    def units(self) -> list[list[Flat]]:
        """The flat groups of FSDP's units; the root unit is first."""
        return self.layouts.units(self.rank)

    def stepping_parts(self, flats: Iterable[Flat]) -> tuple[int, int]:
        """Bytes of state for this rank's parts, and what a step of them holds for a moment."""
        return self.stepping((flat.stepped, flat.owned, flat.largest, flat.tensors) for flat in flats)

    def stepping_in_slices(self, flats: Iterable[Flat]) -> tuple[int, int]:
        """The same of OSS, which has long parts stepped slice by slice, if the optimizer keeps anything of them."""
        state, scratch = self.stepping_parts(flats)
        if not state or not self.gloo or unwrapped(self.layouts.optim) not in ELEMENTWISE:
            return state, scratch
        return state, self.stepping((f.stepped, f.owned, min(f.largest, SLICE), f.tensors) for f in flats)[1]

    def stepping(self, owned: Iterable[tuple[torch.dtype, int, int, int]]) -> tuple[int, int]:
        """The same for lists of tensors: dtype, elements of all, elements of the largest, how many."""
        state, largest, total = 0.0, 0.0, 0.0
        for dtype, elements, most, tensors in owned:
            if elements:
                if dtype not in self.needs:
                    self.needs[dtype] = measure_optimizer(self.layouts.optim, dtype, self.layouts.options.backend)
                needs = self.needs[dtype]
                state += needs.states * elements * dtype.itemsize + needs.fixed * tensors
                scratch = needs.scratch * dtype.itemsize
                total += scratch * elements if needs.at_once else 0
                largest = max(largest, 0 if needs.at_once else scratch * most)
        return round(state), round(largest + total)
