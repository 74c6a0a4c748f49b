"""When units are gathered in a backward, and when their gradients are sent.

backward of a unit    gather, compute, release and send gradients, wait for those of the unit before
end of backward       what is left is released and sent, everything is waited for, ranks agree that all have come

A unit that backward comes to again, by another forward's graph, waits for what it sent, and sends once more.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from zero._torch import at_end_of_backward
from zero.comm import Comm
from zero.fsdp.at_rest import RestingReads
from zero.fsdp.beside import Beside
from zero.fsdp.in_backward import StepsInBackward
from zero.fsdp.prefetch import Prefetch
from zero.fsdp.unit import Call, TrainingState, Unit
from zero.sdp.usage import End


class Backward:
    """Of one model. after: called when a backward is complete, and its gradients are reduced.

    `reduces`: whether gradients are reduced now, or kept (no_sync).
    `steps`: takes an optimizer's steps, where they are taken in backward.
    `accumulates`: whether the last one left its gradients for a later one to reduce.
    `active`: whether one is under way. `awaited`: whether a forward leads to one that has not begun.
    """

    def __init__(
        self, units: Sequence[Unit], comms: Sequence[Comm], prefetch: Prefetch, *, after: Callable[[], None]
    ) -> None:
        self.reduces = True
        self.active = self.awaited = self.accumulates = False
        self._units, self._root, self._prefetch, self._after = units, units[0], prefetch, after
        self._beside = Beside(units)
        self.steps: StepsInBackward | None = None
        self._end = End(comms, "the end of a backward of FSDP")
        self._resting_reads = RestingReads()
        self._interrupted = False
        self._held_by_autograd: weakref.ref[Any] | None = None
        """What autograd calls at the end of this backward."""
        self._under_way: list[Unit] = []
        """Units in backward, in the order in which it came to them."""
        self._sent: Unit | None = None
        """The unit whose gradients are on their way; waited for before those of the next are sent."""

    # --------------------------------------------------------------------------------------------- reads at rest

    def expect_reads(self) -> None:
        """Parameters are given to the user between forward and backward, who may compute with what is at rest."""
        if self.awaited and torch.is_grad_enabled() and not self.active:
            self._resting_reads.begin(self._units)

    def end_reads(self, unit: Unit) -> None:
        """Before the unit is gathered."""
        self._resting_reads.end(unit)

    # ------------------------------------------------------------------------------------------------ a unit's

    def comes_to(self, unit: Unit, call: Call) -> None:
        """Backward is about to compute gradients of a call of the unit."""
        if torch.is_grad_enabled():
            raise RuntimeError(
                f"a gradient was asked for with create_graph=True through {unit.title} of FSDP, whose "
                "parameters are gone by then. Take such gradients at stage 2 (ShardedDDP) or below."
            )
        self._begin()
        unit.expect(call)  # once more, if the graph was retained, or is older than another backward
        self._complete_later_than(call)
        entered = [one for one in (unit, *unit.reads) if one.state is TrainingState.IDLE]
        for one in entered:
            self._enter(one)
        if not call.seen_off:  # which need not be the end of all: re-entrant checkpoints run backwards inside of it
            at_end_of_backward(partial(self.leaves, unit, call))
        if entered and self._prefetch.before_backward:
            if self._prefetch.limit != 3:
                self._finish_sent()
            self._launch_ahead(unit)

    def leaves(self, unit: Unit, call: Call, *_: Any) -> None:
        """Backward has been through the call."""
        if unit.state is not TrainingState.BACKWARD or not unit.leave(call):
            return
        if unit.calls == 0 and not unit.ends_last:
            self._complete(unit)

    def _begin(self) -> None:
        if self._interrupted:
            self.abandon()
        if not self.active:
            self.active = True
            self._beside.begin()
            self._resting_reads.backward_begins()
            if self.steps is not None:
                self.steps.begin()
            finish = self._finish
            self._held_by_autograd = weakref.ref(finish, self._dropped)
            at_end_of_backward(finish)

    def _enter(self, unit: Unit) -> None:
        self._beside.expect(unit)
        self._resting_reads.end(unit)
        if self.steps is not None:
            self.steps.refuse_again(unit)
        unit.unshard()
        if self._sent is unit:  # backward has come to it again
            self._finish_sent()
        unit.enter_backward()
        self._under_way.append(unit)

    def _complete_later_than(self, call: Call) -> None:
        """Completes the units that began to compute after this call had ended: backward has been through these."""
        for unit in self._under_way[::-1]:
            if unit.earliest > call.ended and unit is not self._root and not unit.ends_last:
                self._complete(unit)

    def _launch_ahead(self, unit: Unit) -> None:
        """Gathers the unit that backward comes to next, if it is known and not there."""
        ahead = unit.before
        if ahead is not None and ahead.calls and ahead.state is TrainingState.IDLE:
            ahead.unshard_ahead()

    def _complete(self, unit: Unit, *, at_end: bool = False) -> None:
        """Collective. Backward has been through the unit. The gathering of the unit that comes next goes before the
        sending of gradients: it is needed first."""
        self._under_way.remove(unit)
        if self.reduces:
            unit.gradients.hand_over()
            unit.leave_backward()  # so that what is gathered into its memory need not wait for what was sent
            self._finish_sent()
        else:
            unit.keep_gradients()
        if self._prefetch.after_backward and not at_end:
            self._launch_ahead(unit)
        if self.reduces:
            self._send(unit)

    def _send(self, unit: Unit) -> None:
        self._finish_sent()
        for bucket in unit.gradients.buckets:
            if bucket.trained:
                bucket.launch()
        self._sent = unit
        if self._prefetch.limit == 1:
            self._finish_sent()

    def _finish_sent(self) -> None:
        if self._sent is not None:
            sent, self._sent = self._sent, None
            sent.gradients.finish(sent.title)
            if self.steps is not None:
                self.steps.reduced(sent)

    # ------------------------------------------------------------------------------------------------- its end

    def _finish(self) -> None:
        for unit in reversed(self._units):
            if unit.state is TrainingState.IDLE and unit.calls and (unit.unsharded or unit.gathering):
                self._enter(unit)  # unsharded since forward, or gathered ahead, but not reached: others may have
            if unit.state is TrainingState.BACKWARD:
                self._complete(unit, at_end=True)
            elif unit.gradients.kept and self.reduces:
                unit.gradients.hand_over_leftovers()
                self._send(unit)
        self._finish_sent()
        self._end.reach([bucket for unit in self._units for bucket in unit.gradients.buckets])
        for unit in self._units:
            unit.forget_calls()
            unit.reshard()
            unit.settle()
        self.active = self.awaited = False
        self.accumulates = not self.reduces
        if self.reduces:
            self._after()
        if self.steps is not None:
            self.steps.end(self._units)
        self._resting_reads.backward_ends()

    def _dropped(self, _: Any) -> None:
        """Autograd has let go of what it was to call at the end: without having called it, if backward was interrupted.

        Gradients from before are put back at once, so that they are seen and zero_grad clears them. What has to wait
        for other ranks is left to `abandon`.
        """
        if self.active:
            self._interrupted = True
            self._under_way.clear()
            for unit in self._units:
                unit.interrupt()

    def abandon(self) -> None:
        """Forgets what an exception ended before its end; the model can go on."""
        self._sent = None
        self._resting_reads.forget()
        self.active = self.awaited = self._interrupted = False
        self._under_way.clear()
        for unit in self._units:
            unit.abandon()
