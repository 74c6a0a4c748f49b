"""A step of FSDP: its units gathered, released and reduced as zero.fsdp.schedule does it, in books instead of memory.

Units and Comm are stood in for by what has their verbs and adds up what these take, so FSDP's own Reductions decide
which unit's gradients are sent when. Told once more is what the hooks of Schedule do at each moment of the step.
"""

from __future__ import annotations

from collections.abc import Sequence

from zero.fsdp.reductions import Reductions
from zero.fsdp.unit import Stage
from zero.oss.flat import Residence
from zero.plan.flat import Flat
from zero.plan.job import Job
from zero.plan.ledger import Ledger
from zero.plan.moments import Event
from zero.plan.traffic import PlannedComm, Reduction


class PlannedUnit:
    """The verbs of a Unit.

    stays: whether parameters stay whole from forward to backward, and give up their parts meanwhile.
    `before`, `after`: the units that run before and after it.
    `calls`: 1 from its forward, if that has a graph, until its backward is complete.
    """

    def __init__(
        self, flats: Sequence[Flat], comm: PlannedComm, reduction: Reduction, ledger: Ledger, *, stays: bool
    ) -> None:
        self._flats, self._comm, self._reduction, self._ledger = flats, comm, reduction, ledger
        self._stays = stays
        self.residence = Residence.PART
        self.stage = Stage.IDLE
        self.calls = 0
        self.before: PlannedUnit | None = None
        self.after: PlannedUnit | None = None

    def launch_unshard(self) -> bool:
        launched = self.residence is Residence.PART
        if launched:
            self.residence = Residence.GATHERING
            for flat in self._flats:
                self._ledger.take(self._room(flat))
                self._comm.launch_gather(flat.gathered)
        return launched

    def finish_unshard(self) -> None:
        if self.residence is Residence.GATHERING:
            self.residence = Residence.WHOLE
            for flat in self._flats:
                self._comm.finish_gather()
                self._ledger.give(self._given_up(flat))

    def reshard(self) -> None:
        self.finish_unshard()
        if self.residence is Residence.WHOLE:
            self.residence = Residence.PART
            for flat in self._flats:
                self._ledger.take(self._given_up(flat))
                self._ledger.give(self._room(flat))

    def _room(self, flat: Flat) -> int:
        """What it takes to be whole. A single rank's part is that already, if it is computed with as it is."""
        return 0 if self._comm.alone and not flat.mastered else flat.whole

    def _given_up(self, flat: Flat) -> int:
        return flat.part if self._stays and not (flat.mastered or self._comm.alone) else 0

    def launch_reduce(self) -> None:
        for flat in self._flats:
            self._reduction.launch(flat)

    def finish_reduce(self) -> None:
        self._reduction.finish()


class Step:
    """A forward and a backward. Methods are named for those of Schedule.

    stays: whether units stay whole from forward to backward.
    """

    def __init__(self, job: Job, ledger: Ledger, *, stays: bool) -> None:
        self._ledger, self._prefetch = ledger, job.prefetch
        self._comm, self._reduction = PlannedComm(job, ledger), Reduction(ledger)
        self._reductions = Reductions()
        self._units = [PlannedUnit(unit, self._comm, self._reduction, ledger, stays=stays) for unit in job.units]
        self._kept = {self._units[number] for number in job.course.units_in_backward} if stays else set()
        self._run_again = {self._units[number] for number in job.course.units_run_again}
        self._root = self._last = self._units[0]
        self._course, self._in_backward = job.course, False
        for number in job.course.units_in_turn:  # in the forward before
            self._follow(self._units[number])

    @property
    def sent(self) -> int:
        """Bytes that left the rank for gathering and agreeing."""
        return self._comm.sent

    @property
    def gradients(self) -> int:
        """Bytes of gradients that stay."""
        return self._reduction.kept

    def run(self) -> None:
        for event, number, gradients, before, after in self._course.of_units():
            self._ledger.compute(before, after)
            unit = self._units[number]
            if event is Event.PRE_FORWARD:
                self._pre_forward(unit)
            elif event is Event.POST_FORWARD:
                self._post_forward(unit)
            elif event is Event.PRE_BACKWARD:
                self._pre_backward(unit)
            elif event is Event.GRADIENT:
                if unit.stage is Stage.IDLE:
                    self._pre_backward(unit)  # its own forward did not run: other modules read its parameters
                self._ledger.take(sum(gradients))
            elif event is Event.LEAVING:
                self._leaving(unit)
        self._ledger.end_backward()
        self._finish()

    # ------------------------------------------------------------------------------------------- gathering

    def _launch(self, unit: PlannedUnit) -> None:
        unit.launch_unshard()

    def _gather(self, unit: PlannedUnit) -> None:
        self._launch(unit)
        unit.finish_unshard()

    # --------------------------------------------------------------------------------------------- forward

    def _pre_forward(self, unit: PlannedUnit) -> None:
        self._gather(unit)
        unit.calls = int(unit is not self._root and self._has_graph(unit))
        if not self._in_backward:
            self._follow(unit)
            if self._prefetch.before_forward and unit.after is not None:
                self._launch(unit.after)

    def _has_graph(self, unit: PlannedUnit) -> bool:
        """Whether the forward that runs leads to a backward by itself, and is not run again in backward for that."""
        return self._in_backward or unit not in self._run_again

    def _follow(self, unit: PlannedUnit) -> None:
        if unit not in (self._root, self._last):
            self._last.after, unit.before = unit, self._last
        self._last = unit

    def _post_forward(self, unit: PlannedUnit) -> None:
        if unit is not self._root:
            if unit not in self._kept or not self._has_graph(unit):
                unit.reshard()
            return
        unit.before = self._last
        for ahead in self._units:
            if ahead.residence is Residence.GATHERING:
                ahead.reshard()

    # -------------------------------------------------------------------------------------------- backward

    def _pre_backward(self, unit: PlannedUnit) -> None:
        self._in_backward = True
        self._gather(unit)
        unit.stage = Stage.BACKWARD
        if self._prefetch.before_backward:
            if self._prefetch.limit < 3:
                self._reductions.finish()
            self._launch_ahead(unit)

    def _launch_ahead(self, unit: PlannedUnit) -> None:
        ahead = unit.before
        if ahead is not None and ahead.calls and ahead.stage is Stage.IDLE:
            self._launch(ahead)

    def _leaving(self, unit: PlannedUnit) -> None:
        self._complete(unit)
        if self._prefetch.after_backward:
            self._launch_ahead(unit)
        self._reductions.send()

    def _complete(self, unit: PlannedUnit) -> None:
        self._reductions.finish()
        unit.stage, unit.calls = Stage.IDLE, 0
        unit.reshard()
        self._reductions.put(unit)
        if self._prefetch.limit == 1:
            self._reductions.send()
            self._reductions.finish()

    def _finish(self) -> None:
        for unit in reversed(self._units):
            if unit.stage is Stage.IDLE and unit.calls and unit.residence is not Residence.PART:
                self._gather(unit)
                unit.stage = Stage.BACKWARD
            if unit.stage is Stage.BACKWARD:
                self._complete(unit)
        self._reductions.finish_all()
