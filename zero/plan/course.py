"""The course of a step: what each stage does something at, in order, as it was measured or as it is to be expected."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import dropwhile, takewhile
from typing import NamedTuple

import numpy as np

from zero.plan.kept import Kept
from zero.plan.moments import Event, Mark
from zero.plan.sizes import Sizes

_FORWARD = (Event.PRE_FORWARD, Event.POST_FORWARD)


class Moment(NamedTuple):
    """home: the number of the unit, or of the bucket, that something happens to.

    gradients: bytes of those that are there now, one or several after another.
    before, after: bytes that the model's own computation holds, as of Mark; 0 where nothing was measured.
    """

    event: Event
    home: int
    gradients: Sequence[int] = ()
    before: int = 0
    after: int = 0


class Course:
    """Of one model's step.

    measured: what was measured. Otherwise units run in the model's order, and gradients come from the last parameter to
        the first.
    """

    def __init__(self, sizes: Sizes, kept: Kept, measured: Sequence[Mark] = ()) -> None:
        self._kept, self._measured, self._units = kept, measured, sizes.units
        self._unit_of = {name: self._units[group.unit] for group in sizes.groups for name in group.names}
        self._gradient = dict(zip(kept.names, kept.gradients, strict=True)) if measured else {}

    @property
    def forward(self) -> int:
        """The most that forward holds."""
        return max((mark.before for mark in self._measured_forward), default=0)

    @property
    def _measured_forward(self) -> Iterable[Mark]:
        return takewhile(lambda mark: mark.event in _FORWARD, self._measured)

    @property
    def _measured_backward(self) -> Iterable[Mark]:
        """There may be forwards in it."""
        return dropwhile(lambda mark: mark.event in _FORWARD, self._measured)

    # ---------------------------------------------------------------------------------------- stages 0 to 2

    def gradients(self) -> Iterable[Moment]:
        """Those of all parameters."""
        if self._measured:
            return self._measured_gradients(dict.fromkeys(self._kept.names, 0))
        return [Moment(Event.GRADIENT, 0, self._kept.gradients)]

    def gradients_in(self, buckets: Sequence[Sequence[int]]) -> Iterable[Moment]:
        """buckets: of each the indices of its parameters, counted from the last. By default they are filled in turn."""
        names, kinds, gradients = self._kept.names[::-1], self._kept.kind_of[::-1], self._kept.gradients[::-1]
        if self._measured:
            return self._measured_gradients({names[i]: number for number, one in enumerate(buckets) for i in one})
        return [
            Moment(Event.GRADIENT, number, [gradients[i] for i in one])
            for number, one in enumerate(buckets)
            if kinds[one[0]].trained
        ]

    def _measured_gradients(self, homes: Mapping[str, int]) -> Iterator[Moment]:
        most = 0
        for event, name, before, after in self._measured_backward:
            most = max(most, before)
            if event is Event.GRADIENT:
                yield Moment(event, homes[name], (self._gradient[name],), most, after)
                most = 0

    # --------------------------------------------------------------------------------------------- stage 3

    @cached_property
    def units_in_turn(self) -> Sequence[int]:
        """The units whose forward begins, one after another; the root first."""
        if not self._measured:
            return range(len(self._units))
        return [self._units[mark.name] for mark in self._measured_forward if mark.event is Event.PRE_FORWARD]

    @cached_property
    def units_in_backward(self) -> set[int]:
        """Those that backward comes to: not where neither they nor anything before them is trained."""
        if not self._measured:
            return {unit for unit, _, _ in self._runs}
        return {self._units[mark.name] for mark in self._measured if mark.event is Event.PRE_BACKWARD}

    @cached_property
    def units_run_again(self) -> set[int]:
        """Those whose forward begins in backward: before, they ran without a graph (reentrant checkpointing)."""
        return {self._units[mark.name] for mark in self._measured_backward if mark.event is Event.PRE_FORWARD}

    def of_units(self) -> Iterator[Moment]:
        for event, name, before, after in self._measured:
            if event is Event.GRADIENT:
                yield Moment(event, self._unit_of[name], (self._gradient[name],), before, after)
            else:
                yield Moment(event, self._units[name], (), before, after)
        if not self._measured:
            yield from self._expected_forward()
            yield from self._expected_backward()

    def _expected_forward(self) -> Iterator[Moment]:
        root, *inner = self.units_in_turn
        yield Moment(Event.PRE_FORWARD, root)
        for unit in inner:
            yield Moment(Event.PRE_FORWARD, unit)
            yield Moment(Event.POST_FORWARD, unit)
        yield Moment(Event.POST_FORWARD, root)

    def _expected_backward(self) -> Iterator[Moment]:
        entered = {0}
        yield Moment(Event.PRE_BACKWARD, 0)
        for unit, gradients, last in self._runs:
            if unit not in entered:
                entered.add(unit)
                yield Moment(Event.PRE_BACKWARD, unit)
            yield Moment(Event.GRADIENT, unit, (gradients,))
            if last and unit:
                yield Moment(Event.LEAVING, unit)

    @cached_property
    def _runs(self) -> list[tuple[int, int, bool]]:
        """Parameters of one unit that backward passes one after another: the unit, bytes of their gradients, and
        whether none of it are to come. Frozen ones are passed on the way to what is trained before them."""
        trained = [number for number, kind in enumerate(self._kept.kind_of) if kind.trained]
        if not trained:
            return []
        units = np.fromiter((self._unit_of[name] for name in self._kept.names), np.int64)[trained[0] :][::-1]
        gradients = np.array(self._kept.gradients, np.int64)[trained[0] :][::-1]
        starts = np.flatnonzero(np.diff(units, prepend=-1))
        sums, passed = np.add.reduceat(gradients, starts).tolist(), units[starts].tolist()
        last = {unit: number for number, unit in enumerate(passed)}
        return [(unit, sums[number], last[unit] == number) for number, unit in enumerate(passed)]
