"""Why nothing more can be sent in a process group, and who is told."""

from __future__ import annotations

import os
from collections.abc import Callable
from threading import Thread
from typing import Any
from weakref import WeakSet

from zero.comm import ending, forked
from zero.comm.channels import Channels
from zero.comm.store import RaisedText
from zero.comm.waiting import running_call

REMEDY = (
    "Look for the first error on any rank. If there is none, the call is collective: call it on every rank, also to "
    "evaluate and to save; with fewer batches on one rank than on others take them from zero.join."
)


class Failure:
    """The failure of one process group, in one process. After a failed transfer, no transfer that was in flight counts
    as complete, and every later operation raises with the first cause.

    broken: why nothing more can be sent, or None.
    raised: the text of an error that a rank has raised.
    others: the processes of the other ranks on this host.
    at_failure: functions to call with the error message after a transfer has failed.
    inquire: called after a transfer has failed. It may wait a moment for the word on which rank is missing, and call
        mark_broken with it.
    """

    def __init__(self, rank: int, world: int, channels: Channels) -> None:
        self._rank, self._world, self._channels, self.raised = rank, world, channels, RaisedText()
        self.broken: str | None = None
        self.others: list[int] = []
        self._learned, self._is_fork = False, False
        self.at_failure: list[Callable[[str], object]] = []
        self.inquire: Callable[[], object] = lambda: None
        # Of groups whose operations the device may wait for before those of this one.
        self._coupled: WeakSet[Failure] = WeakSet()
        # Buffers of transfers that failed or were in flight at a failure: these may still write into them.
        self._kept_alive: list[Any] = []
        if world > 1:
            forked.failures.add(self)

    def refuse_if_broken(self, buffers: object = None) -> None:
        """Raises RuntimeError if a transfer has failed. Then no transfer that was in flight counts as complete, and
        `buffers` are kept alive: such a transfer may still read them or write into them."""
        if self.broken:
            self._kept_alive.append(buffers)
            again = "" if self._is_fork else " Initialise the process group again before going on."
            raise RuntimeError(f"{self._why()}{again}")

    def _why(self) -> str:
        """With the call that runs here: another rank may have said why, which does not know it."""
        reason, call = self.raised.explained(self.broken or ""), running_call()
        return reason if call is None or call in reason else f"{reason} Rank {self._rank} has called {call}."

    def mark_broken(self, reason: str, *, by_another: bool = False) -> None:
        """Has every later operation raise with this reason, unless an earlier one is known. by_another: what another
        rank has done, which this one has learned."""
        if self.broken is None:
            # Before the threads: coupled groups mark one another, and would without end while neither is broken.
            self.broken = reason
            if by_another:
                self.learn()
            # All at once: an abort waits for all that the device runs, and that may wait for another group's ranks.
            coupled = [Thread(target=one.mark_broken, args=(reason,), daemon=True) for one in self._coupled]
            for thread in coupled:
                thread.start()
            for act in self.at_failure:
                act(reason)
            for thread in coupled:
                thread.join()

    def learn(self) -> None:
        """Notes that this rank raises what another has raised: its process ends after that one's, if it ends by it."""
        self._learned = True
        ending.after_any(self.others)

    def recover(self) -> None:
        """Ranks have found one another in step."""
        if self._learned:
            self._learned = False
            ending.as_it_comes()

    def end_in_fork(self) -> None:
        """Called in a process that was forked from a rank: what it sent would be taken for that rank's."""
        self._is_fork, self.raised.store = True, None
        self.at_failure.clear()
        self.broken = (
            f"process {os.getpid()} was forked from rank {self._rank}, as workers of a DataLoader are, and cannot take "
            "part in operations between ranks. Compute by the model in the rank's own process, or give the worker a "
            "copy of the module that was made before it was wrapped."
        )

    def couple(self, other: Failure) -> None:
        """Has a failure of either group be one of both."""
        if other is not self:
            self._coupled.add(other)
            other._coupled.add(self)

    def of_transfer(self, channel: int | None, buffers: object, error: BaseException) -> None:
        """Records the failure of a transfer. Raises RuntimeError with a message for the user for an error of a backend
        or the system, and nothing for others, such as Ctrl-C."""
        self._kept_alive.append(buffers)
        if not self.broken:
            self.inquire()
        if not self.broken:  # else ranks are out of step, one is missing, or an earlier transfer failed
            operation = running_call() or ("a transfer" if channel is None else self._channels.name(channel))
            self.mark_broken(
                f"rank {self._rank} failed in {operation}: another rank of the group of {self._world} has stopped, or "
                f"did not reach this operation. {REMEDY} ({error})",
                by_another=isinstance(error, (RuntimeError, OSError)),
            )
        if isinstance(error, (RuntimeError, OSError)):
            raise RuntimeError(self._why()) from error
